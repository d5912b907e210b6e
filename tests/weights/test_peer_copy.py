"""The worker's side of a peer copy between two ranks, with engines that hold one tensor."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from sglrl.weights.group import connect_store
from sglrl.wire.weights import PeerCopyOffer, RankAnswer, ReceivePeerCopy, SendPeerCopy
from sglrl_workers.weights import peer_copy
from sglrl_workers.weights.peer_copy import PeerCopy

LIMIT = 300.0
"""Seconds. A copy that takes longer hangs."""
LONG = 1000.0


class LiveWeights:
    """The parts of an engine's live weights that a peer copy needs.

    Attributes:
        readers: number of threads that are reading the weights.
    """

    device = torch.device("cpu")

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((1000,), value)
        self.readers = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": self.tensor}

    @contextlib.contextmanager
    def reading(self) -> Any:
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1


class Engine:
    """The parts of an engine that a peer copy needs."""

    def __init__(self, value: float) -> None:
        self.live = LiveWeights(value)
        self.version: int | None = None

    def hold(self, update: int, inflight: str) -> None:
        pass

    def held(self, update: int, timeout: float) -> bool:
        return True

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        self.version = version
        return 0.0


class Side:
    """The sender or the receiver of a copy."""

    def __init__(self, value: float) -> None:
        self.engine = Engine(value)
        self.answers: queue.SimpleQueue[RankAnswer] = queue.SimpleQueue()
        on_stream: Callable[[], Any] = contextlib.nullcontext
        engine: Any = self.engine
        self.peer_copy = PeerCopy(engine, "127.0.0.1", on_stream, self.answers.put)

    def answer(self) -> RankAnswer:
        found = self.answers.get(timeout=LIMIT)
        assert found.error is None
        return found

    def offer(self) -> PeerCopyOffer:
        self.peer_copy.send(SendPeerCopy(1, LONG))
        return msgspec.msgpack.decode(self.answer().body, type=PeerCopyOffer)

    @property
    def threads(self) -> list[threading.Thread]:
        return self.peer_copy._link._threads

    def ends(self) -> bool:
        """Wait for the threads of the copy, and return whether all have exited by themselves."""
        self.peer_copy._link.join(LIMIT)
        return not any(thread.is_alive() for thread in self.threads)


@pytest.mark.parametrize("how_far", ["it never came", "it came and is gone"])
def test_a_sender_is_released_when_its_receiver_is_lost(how_far: str) -> None:
    """The sender's thread must stop.

    Otherwise it would read the weights with priority over all other threads for as long as a copy
    may take.
    """
    sender = Side(1.0)
    offer = sender.offer()
    if how_far == "it came and is gone":
        connect_store(offer.host, offer.port, LIMIT).set(peer_copy._ARRIVED, "")
    sender.peer_copy.cancel()
    assert sender.ends()
    assert sender.engine.live.readers == 0


def test_a_sender_that_was_released_gives_again() -> None:
    sender, receiver = Side(1.0), Side(2.0)
    sender.offer()
    sender.peer_copy.cancel()
    receiver.peer_copy.receive(ReceivePeerCopy(2, 7, sender.offer(), LONG))
    receiver.answer()
    assert torch.equal(receiver.engine.live.tensor, sender.engine.live.tensor)
    assert receiver.engine.version == 7
    assert sender.ends()
    assert receiver.ends()


@pytest.mark.parametrize("content", ["", "/autogroup-71 nice 5\n", None])
def test_weights_are_given_whatever_the_system_says_of_autogroups(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is empty for a process without an autogroup, and missing on kernels without them."""
    file = tmp_path / "autogroup"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr(peer_copy, "_AUTOGROUP", file)
    sender, receiver = Side(1.0), Side(2.0)
    receiver.peer_copy.receive(ReceivePeerCopy(2, 7, sender.offer(), LONG))
    receiver.answer()
    assert sender.ends()
    assert receiver.ends()
    assert torch.equal(receiver.engine.live.tensor, sender.engine.live.tensor)
    if content is None:
        assert not file.exists()
    else:
        # The nice value is restored.
        assert file.read_text().split()[-1:] == ["5"] * bool(content)
