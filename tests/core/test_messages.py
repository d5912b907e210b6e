"""Every message there and back, and nothing but ``ProtocolError`` for what is no message."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.codec import decode_to_driver, decode_to_worker, encode
from sglrl.errors import ProtocolError
from sglrl.messages import (
    CallMessage,
    Cancel,
    EngineInfo,
    Item,
    Ready,
    Results,
    Shutdown,
    Starting,
    Submit,
    ToDriver,
    ToWorker,
)

ids = st.integers(-(1 << 63), (1 << 64) - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]))
raws = st.builds(
    lambda value: msgspec.Raw(encode(value)),
    st.recursive(
        st.none() | ids | texts | st.binary() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
        max_leaves=5,
    ),
)
items = st.builds(Item, id=ids, kind=st.integers(0, 3), body=raws, frames=st.integers(0, 9))
infos = st.builds(
    EngineInfo,
    **dict.fromkeys(("model", "architecture", "dtype", "device", "sglang_version"), texts),
    **{
        name: st.integers(0, 1 << 40)
        for name in (
            "vocab_size",
            "context_length",
            "max_prompt_tokens",
            "max_total_tokens",
            "kv_cache_tokens",
        )
    },
    eos_token_ids=st.lists(ids),
    priority_scheduling=st.booleans(),
)
to_worker = st.one_of(
    st.builds(
        Submit,
        st.lists(st.builds(CallMessage, ids, texts, raws, st.integers(0, 9)), max_size=5),
    ),
    st.builds(Cancel, st.lists(ids)),
    st.just(Shutdown()),
)
to_driver = st.one_of(
    st.builds(Results, st.lists(items, max_size=5), st.floats(-1, 1)),
    st.builds(Starting, texts),
    st.builds(
        Ready,
        protocol=ids,
        pid=ids,
        window=ids,
        endpoints=st.lists(texts),
        device=texts,
        engine=st.none() | infos,
    ),
)


@given(message=to_worker)
def test_round_trip_to_worker(message: ToWorker) -> None:
    again = decode_to_worker(encode(message))
    assert type(again) is type(message)
    assert again == message


@given(message=to_driver)
def test_round_trip_to_driver(message: ToDriver) -> None:
    again = decode_to_driver(encode(message))
    assert type(again) is type(message)
    assert again == message


def test_the_strategies_make_every_message() -> None:
    assert set(get_args(ToWorker)) == {Submit, Cancel, Shutdown}
    assert set(get_args(ToDriver)) == {Results, Starting, Ready}


def test_no_tag_is_used_twice() -> None:
    tags = [cls.__struct_config__.tag for cls in (*get_args(ToWorker), *get_args(ToDriver))]
    assert len(tags) == len(set(tags))


@given(data=st.binary())
def test_random_bytes(data: bytes) -> None:
    for decode in (decode_to_worker, decode_to_driver):
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(message=to_worker | to_driver, data=st.data())
def test_damaged_bytes(message: Any, data: st.DataObject) -> None:
    """One byte changed, some cut off, some added: a message or ``ProtocolError``."""
    whole = bytearray(encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))]) + data.draw(
        st.binary(max_size=3)
    )
    for decode in (decode_to_worker, decode_to_driver):
        with contextlib.suppress(ProtocolError):
            decode(damaged)


@given(message=to_worker, data=st.data())
def test_truncated(message: ToWorker, data: st.DataObject) -> None:
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode_to_worker(whole[:cut])


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(encode([99, []]), id="unknown tag"),
        pytest.param(encode([]), id="no tag"),
        pytest.param(encode({"calls": []}), id="a map"),
        pytest.param(encode(None), id="nil"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(encode([1, [[1, "work"]]]), id="a call without arguments"),
        pytest.param(b"\x92\x01\x91\x94\x01\xa1\xff\xc0\x00", id="a name that is not UTF-8"),
        pytest.param(b"\x92\x0c\xa1\xff", id="a stage that is not UTF-8"),
        pytest.param(b"\x92\x0b\xdd\xff\xff\xff\xff", id="four thousand million items"),
        pytest.param(b"\x92\x0b\x91\x93\x01\x01" + b"\x91" * 100_000, id="nested too deeply"),
        pytest.param(encode([11, [[2**64 - 1, "one"]]]), id="a kind that is no number"),
    ],
)
def test_not_a_message(frame: bytes) -> None:
    for decode in (decode_to_worker, decode_to_driver):
        with pytest.raises(ProtocolError, match="not a message for a"):
            decode(frame)


def test_a_message_for_the_other_side() -> None:
    with pytest.raises(ProtocolError, match="not a message for a driver"):
        decode_to_driver(encode(Shutdown()))
    with pytest.raises(ProtocolError, match="not a message for a worker"):
        decode_to_worker(encode(Starting("loading")))


def test_fields_of_a_newer_peer_are_ignored() -> None:
    assert decode_to_driver(encode([12, "loading", "and more"])) == Starting("loading")
    assert decode_to_driver(encode([11, []])) == Results([], -1.0)
