"""Every message survives encoding and decoding. Other bytes raise only ``ProtocolError``."""

from __future__ import annotations

import contextlib
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import ProtocolError
from sglrl.wire.calls import (
    CallMessage,
    Cancel,
    ErrorBody,
    Heartbeat,
    Item,
    Load,
    Ready,
    Results,
    RowsOffer,
    ShareRows,
    Shutdown,
    Starting,
    Submit,
    ToDriver,
    ToWorker,
    heartbeat_identity,
)
from sglrl.wire.codec import (
    decode_from_rank,
    decode_heartbeat,
    decode_to_driver,
    decode_to_rank,
    decode_to_worker,
    encode,
)
from sglrl.wire.engine import EngineInfo
from sglrl.wire.weights import (
    Abort,
    AskChecksums,
    CancelCopy,
    Checksums,
    Commit,
    Describe,
    FromRank,
    Join,
    KeepWeights,
    LiveChecksums,
    PeerCopyOffer,
    Prepare,
    Propose,
    Proposed,
    RankAnswer,
    RankHello,
    RankSettings,
    ReceivePeerCopy,
    Rejoin,
    RestoreWeights,
    SenderAccepted,
    SenderClosed,
    SendPeerCopy,
    Shard,
    Stage,
    TensorSpec,
    ToRank,
    Withdraw,
    rank_identity,
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
items = st.builds(Item, id=ids, kind=st.integers(0, 3), body=st.binary(), frames=st.integers(0, 9))
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
    st.just(ShareRows()),
)
loads = st.builds(
    Load,
    st.floats(-1, 1),
    st.integers(0, 99),
    st.integers(0, 99),
    st.floats(0, 9),
    st.floats(0, 9),
    ids,
)
to_driver = st.one_of(
    st.builds(
        Results,
        st.lists(items, max_size=5),
        st.none() | loads,
        st.lists(ids),
    ),
    st.builds(Starting, texts),
    st.builds(
        Ready,
        protocol=ids,
        pid=ids,
        window=ids,
        endpoints=st.lists(texts),
        device=texts,
        engine=st.none() | infos,
        rows=st.none() | st.builds(RowsOffer, ids, ids),
    ),
)
tensors = st.lists(
    st.builds(TensorSpec, texts, texts, st.lists(ids, max_size=3).map(tuple)), max_size=5
)
seconds = st.floats(0, 1e6)
errors = st.builds(ErrorBody, texts, texts, texts)
sizes = st.lists(ids, max_size=3).map(tuple)
shards = st.builds(Shard, texts, ids, sizes, sizes, ids)
to_rank = st.one_of(
    st.builds(Describe, ids),
    st.builds(
        Join,
        id=ids,
        group=ids,
        host=texts,
        port=ids,
        rank=ids,
        size=ids,
        reader=ids,
        readers=ids,
        timeout=seconds,
    ),
    st.builds(
        Prepare,
        id=ids,
        version=ids,
        tensors=tensors,
        bucket_bytes=ids,
        mode=texts,
        inflight=texts,
        partial=st.booleans(),
        source=texts,
    ),
    st.builds(Stage, ids, texts),
    st.builds(Commit, ids),
    st.builds(Abort, ids, st.booleans()),
    st.builds(Checksums, ids, st.lists(texts)),
    st.builds(LiveChecksums, ids, st.lists(shards), st.none() | errors),
    st.builds(Proposed, ids, st.none() | errors, raws),
    st.builds(SenderAccepted, ids, tensors, st.lists(texts)),
    st.builds(SendPeerCopy, ids, seconds),
    st.builds(ReceivePeerCopy, ids, ids, st.builds(PeerCopyOffer, texts, ids, texts), seconds),
    st.just(CancelCopy()),
    st.builds(Rejoin, ids),
    st.builds(KeepWeights, ids, ids),
    st.builds(RestoreWeights, ids, ids, seconds),
)
rank_settings = st.builds(
    RankSettings,
    **dict.fromkeys(("device", "uuid", "torch", "nccl", "host"), texts),
    environment=st.dictionaries(texts, texts),
    port=ids,
)
from_rank = st.one_of(
    st.builds(RankHello, rank_settings, ids, st.booleans()),
    st.builds(RankAnswer, ids, texts, st.none() | errors, raws),
    st.builds(
        Propose,
        id=ids,
        tensors=tensors,
        version=st.none() | ids,
        inflight=texts,
        mode=texts,
        partial=st.booleans(),
        bucket_bytes=ids,
        timeout=seconds,
        wait=st.booleans(),
    ),
    st.builds(Withdraw, ids),
    st.builds(SenderClosed),
    st.builds(AskChecksums, ids, st.lists(texts), seconds),
)

heartbeats = st.builds(Heartbeat, ids, texts)

DECODERS = (
    decode_to_worker,
    decode_to_driver,
    decode_to_rank,
    decode_from_rank,
    decode_heartbeat,
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


@given(message=to_rank)
def test_round_trip_to_rank(message: ToRank) -> None:
    again = decode_to_rank(encode(message))
    assert type(again) is type(message)
    assert again == message


@given(message=from_rank)
def test_round_trip_from_rank(message: FromRank) -> None:
    again = decode_from_rank(encode(message))
    assert type(again) is type(message)
    assert again == message


@given(message=heartbeats)
def test_round_trip_of_beats(message: Heartbeat) -> None:
    assert decode_heartbeat(encode(message)) == message


def test_the_strategies_make_every_message() -> None:
    assert set(get_args(ToWorker)) == {Submit, Cancel, Shutdown, ShareRows}
    assert set(get_args(ToDriver)) == {Results, Starting, Ready}
    assert set(get_args(ToRank)) == {
        Describe,
        Join,
        Prepare,
        Stage,
        Commit,
        Abort,
        Checksums,
        Proposed,
        SenderAccepted,
        SendPeerCopy,
        ReceivePeerCopy,
        CancelCopy,
        Rejoin,
        KeepWeights,
        RestoreWeights,
        LiveChecksums,
    }
    assert set(get_args(FromRank)) == {
        RankHello,
        RankAnswer,
        Propose,
        Withdraw,
        SenderClosed,
        AskChecksums,
    }


def test_no_tag_is_used_twice() -> None:
    unions = (ToWorker, ToDriver, ToRank, FromRank)
    classes = [Heartbeat, *(cls for union in unions for cls in get_args(union))]
    tags = [cls.__struct_config__.tag for cls in classes]
    assert len(tags) == len(set(tags))


@given(data=st.binary())
def test_random_bytes(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(ProtocolError):
            decode(data)


@given(message=to_worker | to_driver | to_rank | from_rank | heartbeats, data=st.data())
def test_damaged_bytes(message: Any, data: st.DataObject) -> None:
    """Bytes that were changed, cut off or added give a message or ``ProtocolError``."""
    whole = bytearray(encode(message))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))]) + data.draw(
        st.binary(max_size=3)
    )
    for decode in DECODERS:
        with contextlib.suppress(ProtocolError):
            decode(damaged)


@given(message=to_worker, data=st.data())
def test_truncated(message: ToWorker, data: st.DataObject) -> None:
    whole = encode(message)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProtocolError):
        decode_to_worker(whole[:cut])


@given(messages=st.tuples(to_rank, from_rank), data=st.data())
def test_truncated_on_the_weight_channel(
    messages: tuple[ToRank, FromRank], data: st.DataObject
) -> None:
    for message, decode in zip(messages, (decode_to_rank, decode_from_rank), strict=True):
        whole = encode(message)
        cut = data.draw(st.integers(0, len(whole) - 1))
        with pytest.raises(ProtocolError):
            decode(whole[:cut])


@given(messages=st.tuples(to_worker, to_driver, to_rank, from_rank, heartbeats))
def test_every_direction_refuses_the_others_messages(messages: tuple[Any, ...]) -> None:
    for message, its_own in zip(messages, DECODERS, strict=True):
        for decode in DECODERS:
            if decode is not its_own:
                with pytest.raises(ProtocolError, match="not a message"):
                    decode(encode(message))


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
        pytest.param(encode([24]), id="a commit of nothing"),
        pytest.param(encode([25, 1, 1]), id="an abort that leaves 1"),
        pytest.param(encode([26, 1, [b"name"]]), id="a name that is no text"),
        pytest.param(b"\x93\x1a\x01\x91\xa1\xff", id="a tensor's name that is not UTF-8"),
        pytest.param(encode([28, 1, [["w", "float32", [2, "x"]]], []]), id="a shape with an x"),
        pytest.param(encode([28, 1, [["w", "float32"]], []]), id="a tensor without a shape"),
        pytest.param(encode([40, ["cpu", ""]]), id="settings without names"),
        pytest.param(encode([40, {"device": "cpu"}]), id="settings without most"),
        pytest.param(encode([41, 1]), id="an answer to no phase"),
        pytest.param(encode([41, "1", "join"]), id="an answer to text"),
        pytest.param(encode([41, 1.5, "join"]), id="an answer to a half"),
    ],
)
def test_not_a_message(frame: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError, match="not a message f"):
            decode(frame)


def test_a_message_for_the_other_side() -> None:
    with pytest.raises(ProtocolError, match="not a message for a driver"):
        decode_to_driver(encode(Shutdown()))
    with pytest.raises(ProtocolError, match="not a message for a worker"):
        decode_to_worker(encode(Starting("loading")))
    with pytest.raises(ProtocolError, match="not a message for a rank"):
        decode_to_rank(encode(RankAnswer(1, "join")))
    with pytest.raises(ProtocolError, match="not a message from a rank"):
        decode_from_rank(encode(Stage(1)))
    with pytest.raises(ProtocolError, match="not a message from a worker's heartbeat"):
        decode_heartbeat(encode(Starting("loading")))


def test_fields_of_a_newer_peer_are_ignored() -> None:
    assert decode_to_driver(encode([12, "loading", "and more"])) == Starting("loading")
    assert decode_to_driver(encode([11, []])) == Results([])
    assert decode_to_rank(encode([24, 7, "and more"])) == Commit(7)
    assert decode_to_rank(encode([23, 7])) == Stage(7, "")
    assert decode_from_rank(encode([41, 7, "join"])) == RankAnswer(7, "join")


def test_ranks_have_identities_of_their_own() -> None:
    known = {rank_identity(worker, rank) for worker in (b"w1", b"w11") for rank in (0, 1, 11)}
    assert len(known) == 6
    assert rank_identity(b"w1", 0) == b"w1/0"
    assert heartbeat_identity(b"w1") == b"w1/heartbeat"
