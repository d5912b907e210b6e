"""Every message of a node survives encoding and decoding. Other bytes raise ``ProtocolError``."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import ProtocolError
from sglrl.wire.calls import Shutdown
from sglrl.wire.codec import (
    decode_from_node,
    decode_of_connection,
    decode_to_node,
    encode,
)
from sglrl.wire.nodes import (
    Acknowledge,
    Admit,
    ClosePool,
    FromNode,
    FromPool,
    Goodbye,
    Invite,
    NodeHello,
    Numbered,
    OfConnection,
    OpenPool,
    Output,
    PoolOpened,
    Refuse,
    ToNode,
    ToPool,
)
from sglrl.wire.processes import (
    ActorSpec,
    Dump,
    Environment,
    Exited,
    Fork,
    Forked,
    Kill,
    WorkerSpec,
)

ACTOR = ActorSpec(target="module:Class", code=b"\0", args=b"\x90", frames=[b"raw"], window=8)
SPEC = WorkerSpec(
    index=1, identity=b"1-ab", address="tcp://h:1", max_message_bytes=1 << 20, body=ACTOR
)
FORK = Fork(key=1, spec=SPEC, env={"A": "b"}, log="", cwd="", sys_path=None)
HELLO = NodeHello(
    protocol=1,
    name="host",
    environment=Environment(python="3.11", sglrl="0.2.0", sglang=""),
    gpus=("0", "1"),
    cores=8,
    orphan_timeout=30.0,
    session="s",
    received=3,
)
SAMPLES: tuple[tuple[Any, Any, list[Any]], ...] = (
    (
        decode_of_connection,
        OfConnection,
        [
            HELLO,
            Admit("s", 2),
            Admit("", 0, HELLO.environment),
            Refuse("why"),
            Numbered(1, 2),
            Acknowledge(2),
            Goodbye(),
            Invite("tcp://127.0.0.1:7000"),
        ],
    ),
    (
        decode_to_node,
        ToNode,
        [
            OpenPool(1, "plain", {"SGLANG_X": "1"}),
            ClosePool(1),
            ToPool(1, FORK),
            ToPool(1, Kill(2)),
            ToPool(1, Dump(2)),
        ],
    ),
    (
        decode_from_node,
        FromNode,
        [
            PoolOpened(1),
            PoolOpened(1, "error", "output"),
            FromPool(1, Forked(2, 3)),
            FromPool(1, Exited(2, -9)),
            Output(1, 2, "text"),
        ],
    ),
)


@pytest.mark.parametrize(("decode", "union", "messages"), SAMPLES)
def test_messages_survive(decode: Any, union: Any, messages: list[Any]) -> None:
    assert {type(message) for message in messages} == set(get_args(union))
    for message in messages:
        assert decode(encode(message)) == message


@pytest.mark.parametrize(("decode", "union", "messages"), SAMPLES)
@given(data=st.data())
def test_other_bytes(decode: Any, union: Any, messages: list[Any], data: st.DataObject) -> None:
    """Bytes that were changed or cut off give a message or ``ProtocolError``."""
    whole = bytearray(encode(data.draw(st.sampled_from(messages))))
    whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for frame in (bytes(whole[: data.draw(st.integers(0, len(whole)))]), encode(Shutdown())):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode(frame), get_args(union))
