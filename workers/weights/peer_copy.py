"""One rank gives its live weights to the same rank of a new worker, which has none yet.

Beside the weight channel's own groups: a store and a group of two for each hand-over, on a link
thread of its own, so the giver goes on decoding and whatever goes wrong ends with the group. The
coordinator lets no update run meanwhile, so the weights that are read do not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglrl.errors import SglrlError, WeightUpdateError
from sglrl.weights.bucket_sender import perform
from sglrl.weights.group import Group, Store, connect_store
from sglrl.weights.link import Link
from sglrl.wire.codec import encode
from sglrl.wire.weights import PeerCopyOffer, RankAnswer, ReceivePeerCopy, SendPeerCopy

if TYPE_CHECKING:
    from .weight_engine import WeightEngine

logger = logging.getLogger("sglrl.worker")

GIVE, TAKE = "give", "take"
_HOST = "127.0.0.1"
_PREFIX = "sglrl/hand-over"
_ARRIVED = "sglrl/arrived"
"""The key that the rank that takes sets when it has come."""
_BATCH_BYTES = 1 << 30
_CONNECT_SECONDS = 10.0
"""The giver's store listens already."""
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_SECONDS = 0.15


class HandOver:
    """``on_stream``: the context that a rank's transfers run in. ``answer``: called from any thread
    with what the driver is to be told."""

    def __init__(
        self,
        engine: WeightEngine,
        on_stream: Callable[[], AbstractContextManager[None]],
        answer: Callable[[RankAnswer], None],
    ) -> None:
        self._engine = engine
        self._device = engine.device
        self._on_stream = on_stream
        self._answer = answer
        self._link = Link()
        self._taking = -1

    def give(self, message: SendPeerCopy) -> None:
        """Answered with an ``PeerCopyOffer`` as soon as the other may come."""
        link = self._fresh()
        found: dict[str, Any] = {}

        def offer() -> PeerCopyOffer:
            found["live"] = self._engine.live()
            link.store = Store(_HOST, message.timeout)
            port = link.store.port
            # A connection as the other rank has one: it breaks when the store is closed.
            found["store"] = connect_store(_HOST, port, message.timeout)
            return PeerCopyOffer(_HOST, port, _digest(found["live"]))

        def send() -> None:
            if "store" in found:
                # That it came to nothing is the other's to say; torch has errors of its own.
                quiet = contextlib.suppress(SglrlError, RuntimeError)
                with quiet, _before_others():
                    # The other rank may never come. Nothing but this wait is to be ended then.
                    found["store"].wait([_ARRIVED])
                    with self._engine.reading():
                        self._transfer(link, found["store"], 0, found["live"], message.timeout)
            link.abandon()

        link.submit(lambda: self._answer(perform(message.id, GIVE, offer)))
        link.submit(send)

    def take(self, message: ReceivePeerCopy) -> None:
        """Answered when the weights are live and the engine has their version."""
        link = self._fresh()
        self._taking = message.id

        def receive() -> None:
            live = self._engine.live()
            if _digest(live) != message.offer.digest:
                raise WeightUpdateError("the two workers do not hold the same tensors")
            self._engine.hold(message.id, "continue")
            version = None
            try:
                if not self._engine.held(message.id, message.timeout):
                    raise WeightUpdateError("the engine did not come to rest in time")
                offer = message.offer
                patience = min(message.timeout, _CONNECT_SECONDS)
                store = connect_store(offer.host, offer.port, patience)
                store.set(_ARRIVED, "")
                self._transfer(link, store, 1, live, message.timeout)
                link.check()
                version = message.version
            finally:
                self._engine.release(message.id, version)

        def job() -> None:
            self._answer(perform(message.id, TAKE, receive))
            link.abandon()

        link.submit(job)

    def give_up(self) -> None:
        """The engine is let go at once, whatever the link's thread waits in."""
        self._link.abandon()
        self._engine.release(self._taking, None)

    def _fresh(self) -> Link:
        self._link.abandon()
        self._link = Link()
        return self._link

    def _transfer(
        self, link: Link, store: Any, rank: int, live: dict[str, torch.Tensor], timeout: float
    ) -> None:
        group = link.group = Group(store, _PREFIX, rank, 2, self._device, _HOST, timeout)
        link.check()
        group.begin()
        with self._on_stream(), group.deadline():
            for batch in _batches(live):
                link.check()
                # What is not contiguous travels as a copy.
                pieces = [tensor.contiguous() for tensor in batch]
                if not group.takes_pieces:
                    pieces = _as_one(group, pieces)
                else:
                    group.broadcast(pieces).wait()
                for tensor, piece in zip(batch, pieces, strict=True):
                    if rank == 1 and piece is not tensor:
                        tensor.copy_(piece)
            group.synchronize()


@contextlib.contextmanager
def _before_others() -> Iterator[None]:
    """A worker on a CPU that has let all others go first does so no more, and this thread goes
    before those of it that decode, as far as the system lets it: a new worker waits for it."""
    nice = _autogroup_nice()
    if nice is not None:
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text("0")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
    try:
        yield
    finally:
        # Who found it so already, because another hand-over had begun or no request had run, leaves
        # it as it has become meanwhile.
        with contextlib.suppress(OSError):
            try:
                if nice is not None and nice != "0":
                    _AUTOGROUP.write_text(nice)
            except BlockingIOError:
                # One change of them all in a tenth of a second is let through: sched(7).
                time.sleep(_AUTOGROUP_SECONDS)
                _AUTOGROUP.write_text(str(nice))


def _autogroup_nice() -> str | None:
    """The nice value of this process's autogroup (sched(7)); None if it has no autogroup."""
    try:
        # "/autogroup-71 nice 5". Empty for a process that is in no autogroup.
        words = _AUTOGROUP.read_text().split()
    except OSError:
        return None
    return words[-1] if words else None


def _as_one(group: Group, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Broadcast them packed together; what has arrived. Whenever a thread waits for a broadcast,
    the giver's scheduler takes over, which computes and lets go of Python late."""
    packed = torch.cat([piece.reshape(-1).view(torch.uint8) for piece in pieces])
    group.broadcast([packed]).wait()
    if group.rank == 0:
        return pieces
    parts = packed.split([piece.nbytes for piece in pieces])
    # A copy, because a part may begin where no number of its type can.
    return [
        part.clone().view(piece.dtype).view(piece.shape)
        for part, piece in zip(parts, pieces, strict=True)
    ]


def _digest(live: dict[str, torch.Tensor]) -> str:
    what = [(name, str(t.dtype), tuple(t.shape)) for name, t in live.items()]
    return hashlib.sha256(encode(what)).hexdigest()


def _batches(live: dict[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In order, about as many bytes at a time."""
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in live.values():
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            continue
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += nbytes
    if batch:
        yield batch
