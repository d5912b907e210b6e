"""Copy live weights from one rank to the same rank of a new worker: the code of both ranks.

Each copy has its own store, process group of two ranks and link thread, separate from the weight
channel's. The sending rank thus keeps decoding during a copy, and a failure ends only the copy. The
driver starts no update during a copy, so the sent weights do not change.
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
from typing import Any

import torch

from sglrl.errors import SglrlError, WeightUpdateError
from sglrl.weights.bucket_sender import perform
from sglrl.weights.group import Group, Store, connect_store
from sglrl.weights.link import Link
from sglrl.wire.codec import encode
from sglrl.wire.weights import PeerCopyOffer, RankAnswer, ReceivePeerCopy, SendPeerCopy

from .weight_engine import WeightEngine, overwriting

logger = logging.getLogger("sglrl.worker")

SEND, RECEIVE = "send copy", "receive copy"
_PREFIX = "sglrl/peer-copy"
_ARRIVED = "sglrl/arrived"
"""The receiving rank sets this key when it has connected."""
_BATCH_BYTES = 1 << 30
_CONNECT_SECONDS = 10.0
"""Time limit to connect to the sending rank's store, which is already listening."""
_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_SECONDS = 0.15


class PeerCopy:
    """One rank's side of peer copies, one at a time.

    Args:
        host: the address at which the ranks of other workers reach this process.
        on_stream: returns the context in which transfers run.
        answer: sends an answer to the driver. This class calls it on any thread.
    """

    def __init__(
        self,
        engine: WeightEngine,
        host: str,
        on_stream: Callable[[], AbstractContextManager[None]],
        answer: Callable[[RankAnswer], None],
    ) -> None:
        self._engine = engine
        self._host = host
        self._device = engine.live.device
        self._on_stream = on_stream
        self._answer = answer
        self._link = Link()
        self._receiving = -1
        """The id of the last ``ReceivePeerCopy``."""

    def send(self, message: SendPeerCopy) -> None:
        """Answer with a ``PeerCopyOffer``, then send the weights when the receiver connects."""
        link = self._fresh()
        ready: dict[str, Any] = {}

        def offer() -> PeerCopyOffer:
            ready["live"] = self._engine.live.tensors()
            link.store = Store(self._host, message.timeout)
            port = link.store.port
            # Connect as a client, like the receiver, so that closing the store ends the wait.
            ready["store"] = connect_store(self._host, port, message.timeout)
            return PeerCopyOffer(self._host, port, digest(ready["live"]))

        def transfer() -> None:
            if "store" in ready:
                # The receiver reports a failure, so ignore it here. torch raises RuntimeError.
                quiet = contextlib.suppress(SglrlError, RuntimeError)
                with quiet, _before_others():
                    # Until the receiver connects, an abort only has to interrupt this wait.
                    ready["store"].wait([_ARRIVED])
                    with self._engine.live.reading():
                        self._transfer(link, ready["store"], 0, ready["live"], message.timeout)
            link.abandon()

        link.submit(lambda: self._answer(perform(message.id, SEND, offer)))
        link.submit(transfer)

    def receive(self, message: ReceivePeerCopy) -> None:
        """Receive the weights. Answer when they are live and the engine has their version."""
        link = self._fresh()
        self._receiving = message.id

        def copy() -> None:
            live = self._engine.live.tensors()
            if digest(live) != message.offer.digest:
                raise WeightUpdateError("the two workers do not hold the same tensors")
            with overwriting(self._engine, message.id, message.version, message.timeout):
                offer = message.offer
                patience = min(message.timeout, _CONNECT_SECONDS)
                store = connect_store(offer.host, offer.port, patience)
                store.set(_ARRIVED, "")
                self._transfer(link, store, 1, live, message.timeout)
                link.check()

        def job() -> None:
            self._answer(perform(message.id, RECEIVE, copy))
            link.abandon()

        link.submit(job)

    def cancel(self) -> None:
        """Stop the copy, and release the engine at once, even while the link's thread waits."""
        self._link.abandon()
        self._engine.release(self._receiving, None)

    def _fresh(self) -> Link:
        self._link.abandon()
        self._link = Link()
        return self._link

    def _transfer(
        self, link: Link, store: Any, rank: int, live: dict[str, torch.Tensor], timeout: float
    ) -> None:
        group = link.group = Group(store, _PREFIX, rank, 2, self._device, self._host, timeout)
        link.check()
        group.begin()
        with self._on_stream(), group.deadline():
            for batch in _batches(live):
                link.check()
                # A tensor that is not contiguous is sent as a contiguous copy.
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
    """Raise the priority of this thread, because a new worker waits for it.

    A worker on a CPU lowers the priority of its process and its autogroup when it starts to serve.
    This function raises both, as far as the system permits.
    """
    nice = _autogroup_nice()
    if nice is not None:
        with contextlib.suppress(OSError):
            _AUTOGROUP.write_text("0", encoding="utf-8")
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
    try:
        yield
    finally:
        # A value that was already 0 stays: another copy runs, or this worker had no requests.
        with contextlib.suppress(OSError):
            try:
                if nice is not None and nice != "0":
                    _AUTOGROUP.write_text(nice, encoding="utf-8")
            except BlockingIOError:
                # The kernel permits one change every tenth of a second: sched(7).
                time.sleep(_AUTOGROUP_SECONDS)
                _AUTOGROUP.write_text(str(nice), encoding="utf-8")


def _autogroup_nice() -> str | None:
    """Return the nice value of this process's autogroup (sched(7)), or None without autogroups."""
    try:
        # The content is like "/autogroup-71 nice 5", or empty if the process has no autogroup.
        words = _AUTOGROUP.read_text(encoding="utf-8").split()
    except OSError:
        return None
    return words[-1] if words else None


def _as_one(group: Group, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Broadcast the pieces as one tensor, and return the pieces on both ranks.

    Few broadcasts are faster, because each wait costs time: the sender's scheduler thread takes
    the GIL during the wait, and releases it late.
    """
    packed = torch.cat([piece.reshape(-1).view(torch.uint8) for piece in pieces])
    group.broadcast([packed]).wait()
    if group.rank == 0:
        return pieces
    parts = packed.split([piece.nbytes for piece in pieces])
    # Copy each part, because its address may not be aligned for its dtype.
    return [
        part.clone().view(piece.dtype).view(piece.shape)
        for part, piece in zip(parts, pieces, strict=True)
    ]


def digest(live: dict[str, torch.Tensor]) -> str:
    """Return a digest of the names, dtypes and shapes of the tensors."""
    what = [(name, str(t.dtype), tuple(t.shape)) for name, t in live.items()]
    return hashlib.sha256(encode(what)).hexdigest()


def _batches(live: dict[str, torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split the tensors, in order, into batches of about ``_BATCH_BYTES``."""
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
