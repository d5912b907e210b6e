"""Every message that may arrive at a rank's end of the weight channel.

No group is ever formed, because the store that a message names does not exist.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec
import pytest
import torch

from sglrl.errors import ProtocolError, WeightUpdateError
from sglrl.wire.codec import decode_from_rank, decode_to_rank, encode
from sglrl.wire.processes import ActorSpec, WorkerSpec
from sglrl.wire.weights import (
    Abort,
    Describe,
    ModelDescription,
    Prepare,
    RankAnswer,
    RankHello,
    Shard,
    Stage,
    TensorSpec,
)
from sglrl_workers.weights import peer_copy, rank_channel, rank_socket
from sglrl_workers.weights.staging import Update

from .harness import memory
from .mutator import FRAMES, Mutator
from .samples import SPECS, to_rank

MESSAGES = max(400, FRAMES // 40)
BATCH = 50
GROWTH = 64 << 20
FIRST_GOOD = 10**15


class Wire:
    """Replaces the channel's socket. It connects the test's thread and the channel's thread."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.arriving: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.awake = threading.Event()

    def put(self, frames: list[bytes]) -> None:
        self.arriving.put(frames)
        self.wake()

    def wake(self) -> None:
        self.awake.set()

    def receive(self) -> list[bytes] | None:
        try:
            return self.arriving.get_nowait()
        except queue.Empty:
            return None

    def wait(self, timeout: float) -> bool:
        self.awake.wait(timeout)
        self.awake.clear()
        return True

    def send(self, frames: Sequence[bytes]) -> None:
        self.sent.put(decode_from_rank(frames[0]))

    def close(self) -> None:
        self.sent.put(None)


class Weights:
    """Weights that are never accessed."""

    device = torch.device("cpu")

    def describe(self) -> ModelDescription:
        return ModelDescription(SPECS, ["tied"])

    def checksums(self, names: Sequence[str]) -> list[Shard]:
        return [Shard(name, 0, (4,), (1,), 1) for name in names if name == "w"]

    def bind(self, staged: Any) -> Any:
        raise AssertionError("nothing was ever received")

    copy = targets = bind

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def spare(self, names: Sequence[str]) -> None:
        return None

    def settle(self) -> None:
        pass


class Engine:
    """An engine whose weights are never accessed."""

    def __init__(self) -> None:
        self.live = Weights()
        self.holds = 0

    def staged(self, update: int, bound: Any) -> None:
        raise AssertionError("nothing was ever received")

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        raise AssertionError("nothing was ever received")

    def step_seconds(self) -> float:
        return 0.01

    def forget(self) -> None:
        pass

    def commit(self, update: int, version: int, inflight: str) -> None:
        raise WeightUpdateError("nothing is staged")

    def hold(self, update: int, inflight: str) -> None:
        self.holds += 1

    def held(self, update: int, timeout: float) -> bool:
        return True

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        return 0.0


def channel_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("sglrl-weight")}


def answer_to(wire: Wire, id_: int) -> RankAnswer:
    """Return the answer to message ``id_``.

    Earlier answers may belong to mutated messages that happened to be valid.
    """
    while True:
        message = wire.sent.get(timeout=300)
        if isinstance(message, RankAnswer) and message.id == id_:
            return message


def names_files(frames: Sequence[bytes]) -> bool:
    """Return whether the message names files. A mutated message could name existing files."""
    try:
        return bool(getattr(decode_to_rank(frames[0]), "source", ""))
    except ProtocolError:
        return False


def test_a_ranks_weight_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_there(*args: Any) -> None:
        raise WeightUpdateError("nobody is there")

    monkeypatch.setattr(rank_socket, "ZmqPolledDealer", Wire)
    monkeypatch.setattr(rank_channel, "connect_store", nobody_there)
    monkeypatch.setattr(peer_copy, "connect_store", nobody_there)
    monkeypatch.setattr(peer_copy, "Store", nobody_there)
    threads = channel_threads()
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    body = ActorSpec(target="", code=b"", args=b"", frames=[], window=1)
    spec = WorkerSpec(index=0, identity=b"w", address="", max_message_bytes=1 << 20, body=body)
    engine = Engine()
    rank = rank_channel.RankWeights(spec, 0, engine)
    while rank._socket._dealer is None:
        rank._socket._thread.join(0.001)
    wire: Any = rank._socket._dealer
    assert isinstance(wire.sent.get(timeout=300), RankHello)
    mutator = Mutator(to_rank())
    before = 0
    rounds = max(4, MESSAGES // BATCH)
    for n in range(rounds):
        mutator.ids = [1, 4, n, n + 1]
        for _ in range(BATCH):
            message = mutator.message()
            if not names_files(message):
                wire.put(message)
        wire.put([encode(Describe(FIRST_GOOD + n))])
        found = answer_to(wire, FIRST_GOOD + n)
        assert found.error is None
        described = msgspec.msgpack.decode(found.body, type=ModelDescription)
        assert described == ModelDescription(SPECS, ["tied"])
        assert rank._socket._thread.is_alive()
        assert not rank._current.dirty
        if n == rounds // 4:
            before = memory()
    assert memory() - before < GROWTH
    assert rank._socket._dropped.count > MESSAGES // 4

    rank.close()
    rank._socket._thread.join(300)
    for link in (rank._link, rank._questions, rank._peer_copy._link):
        link.abandon()
    for thread in channel_threads() - threads:
        while thread.ident is None:
            # Another thread is just starting this thread, which cannot be joined before.
            time.sleep(0.001)
        thread.join(300)
        assert not thread.is_alive()
    assert not raised, raised[0]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[rank_channel.RankWeights]:
    monkeypatch.setattr(rank_socket, "ZmqPolledDealer", Wire)
    body = ActorSpec(target="", code=b"", args=b"", frames=[], window=1)
    spec = WorkerSpec(index=0, identity=b"w", address="", max_message_bytes=1 << 20, body=body)
    made = rank_channel.RankWeights(spec, 0, Engine())
    while made._socket._dealer is None:
        made._socket._thread.join(0.001)
    yield made
    made.close()
    made._socket._thread.join(300)
    for link in (made._link, made._questions, made._peer_copy._link):
        link.abandon()


def test_a_manifest_that_is_left_out_is_the_one_before(rank: rank_channel.RankWeights) -> None:
    wire: Any = rank._socket._dealer

    def prepare(id_: int, tensors: list[TensorSpec], like: int) -> str:
        """Return the error message, or an empty string."""
        message = Prepare(id_, 1, tensors, 1 << 20, "full", "continue", False, "", like)
        wire.put([encode(message)])
        error = answer_to(wire, id_).error
        return "" if error is None else error.message

    unknown = "the manifest is one that this rank does not have"
    assert prepare(1, [], 7) == unknown
    assert prepare(2, SPECS, 0) == ""
    assert prepare(3, [], 2) == ""
    assert prepare(4, [], 3) == ""
    assert rank._last.tensors == SPECS
    # A message may refer only to the previous manifest.
    assert prepare(5, [], 3) == unknown
    assert "no tensors are given" in prepare(6, [], 5)


def test_what_was_given_up_is_not_staged(
    rank: rank_channel.RankWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update's abort made the engine forget it. There is no second abort."""
    wire: Any = rank._socket._dealer
    staged: list[int] = []
    forgotten = threading.Event()

    def read(link: Any, update: Update) -> None:
        """Replaces ``FilesStage.read``. Files have no group that an abort could close."""
        if update.id == 1:
            wire.put([encode(Abort(update.id, False))])
            assert forgotten.wait(60.0)

    def error_of(id_: int, phase: str) -> Any:
        while (answer := answer_to(wire, id_)).phase != phase:
            pass
        return answer.error

    monkeypatch.setattr(rank._files, "read", read)
    monkeypatch.setattr(rank._engine, "staged", lambda id_, bound: staged.append(id_))
    monkeypatch.setattr(rank._engine, "forget", forgotten.set)
    errors = []
    for id_ in (1, 2):
        wire.put([encode(Prepare(id_, 1, SPECS, 1 << 20, "full", "continue", False, "folder"))])
        assert error_of(id_, "prepare") is None
        wire.put([encode(Stage(id_, "full"))])
        errors.append(error_of(id_, "stage"))
    assert staged == [2]
    assert errors[0].message == "the update was given up"
    assert errors[1] is None


def test_half_new_weights_are_overwritten_in_place(
    rank: rank_channel.RankWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-written weights are overwritten in place, even if there is room for a copy.

    The engine is held in the middle of the update. A copy would wait for the engine, which does not
    reach it.
    """
    monkeypatch.setattr(rank._memory, "room", lambda wanted: 1 << 40)
    message = Prepare(1, 1, SPECS, 1 << 20, "auto", "continue", False, "")
    assert rank._prepare(message).mode == "full"
    rank._current.dirty = True
    assert rank._prepare(message).mode == "bucketed"


def test_what_was_given_up_is_written_no_more(rank: rank_channel.RankWeights) -> None:
    wire: Any = rank._socket._dealer
    written: list[int] = []
    link, current = rank._link, rank._current

    def write(id_: int) -> None:
        with current.writing(link, id_):
            written.append(id_)

    write(3)
    wire.put([encode(Abort(3, False))])
    assert answer_to(wire, 3).error is None
    with pytest.raises(WeightUpdateError, match="given up"):
        write(3)
    write(4)
    wire.put([encode(Abort(4, True))])
    assert answer_to(wire, 4).error is None
    # A thread may still work for the group that was left.
    with pytest.raises(WeightUpdateError, match="given up"):
        write(5)
    assert written == [3, 4]
