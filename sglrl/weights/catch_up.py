"""Bring a replacement worker to the version of the pool.

The weights come from another worker, from the memory of the replacement's host, or from files.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..errors import ModelError, SglrlError, WeightUpdateError
from ..wire.weights import PeerCopyOffer, ReceivePeerCopy, SendPeerCopy
from .deadline import Deadline
from .kept import Kept
from .questions import Questions
from .ranks import Rank, check_alive
from .safetensors_files import fingerprint, weight_files
from .update_request import UpdateRequest

logger = logging.getLogger("sglrl.weights")

Copy = Callable[[Deadline], Awaitable[bool]]
ReadFiles = Callable[[UpdateRequest, Sequence[Rank]], Awaitable[SglrlError | None]]

_offer = msgspec.msgpack.Decoder(PeerCopyOffer)
_received = msgspec.msgpack.Decoder(None)


class CatchUp:
    """Brings workers to the version of the pool, one at a time.

    Args:
        kept: the weights that hosts keep in memory.
        host: ``host(worker)`` returns the name of the worker's host.
        read_files: ``read_files(request, ranks)`` makes ``ranks`` read the files of the last
            update. It returns the error, or None.
    """

    def __init__(
        self, questions: Questions, kept: Kept, host: Callable[[int], str], read_files: ReadFiles
    ) -> None:
        self._questions = questions
        self._kept = kept
        self._host = host
        self._read_files = read_files
        self._folder: UpdateRequest | None = None
        """The request of the last update, if the workers read all tensors from files, or None."""

    def updated(self, request: UpdateRequest) -> None:
        """Record an update of the pool that has just finished."""
        self._folder = request if request.folder and not request.partial else None

    def has(self, version: int) -> bool:
        """Return whether a worker could get this version from a host's memory or from files."""
        return self._kept.is_kept(version) or (
            self._folder is not None and _is_there(self._folder, version)
        )

    async def bring(
        self, receivers: Sequence[Rank], holders: Sequence[Rank], version: int, deadline: Deadline
    ) -> bool:
        """Send the current weights to a worker. The caller holds the lock of updates.

        Args:
            receivers: all ranks of the worker. They have sent ``RankHello``.
            holders: all ranks of the other workers that have the current weights.
            version: the version of the current weights.

        Returns:
            False if no source has the current weights, or if the files could not be read.

        Raises:
            WorkerLost: the worker is lost. Raised as soon as the loss is known.
            SglrlError: the error of the last copy, if every copy failed and there are no files.
        """
        worker = receivers[0].worker
        failure: SglrlError | None = None
        sources = self._sources(receivers, holders, version)
        while sources:
            source, copy = sources.pop(0)
            begun = time.perf_counter()
            # If this source hangs, half of the remaining time is left for the other sources.
            limit = Deadline(deadline.left / 2) if sources else deadline
            try:
                there = await copy(limit)
                check_alive(receivers)
            except SglrlError as error:
                check_alive(receivers)
                failure = error
                logger.warning("worker %d got no weights from %s: %s", worker, source, error)
                continue
            if there:
                took = (time.perf_counter() - begun) * 1e3
                logger.info(
                    "worker %d got the weights of version %d from %s in %.0f ms",
                    worker,
                    version,
                    source,
                    took,
                )
                return True
        request = self._folder
        if request is not None and _is_there(request, version):
            failed = await self._read_files(request, receivers)
            if failed is None:
                return True
            check_alive(receivers)
            logger.warning("worker %d could not read %s: %s", worker, request.folder, failed)
            # The files are the cause, not the worker. A replacement could not read them either.
            return False
        if failure is not None:
            raise failure
        return False

    def _sources(
        self, receivers: Sequence[Rank], holders: Sequence[Rank], version: int
    ) -> list[tuple[str, Copy]]:
        """Return the sources of the current weights with their copy functions, nearest first."""
        host = self._host(receivers[0].worker)
        peers: dict[int, list[Rank]] = {}
        for rank in holders:
            peers.setdefault(rank.worker, []).append(rank)
        near: list[tuple[str, Copy]] = []
        far: list[tuple[str, Copy]] = []
        for peer, senders in sorted(peers.items()):
            copy = partial(self._copy_worker, receivers, senders, version)
            (near if self._host(peer) == host else far).append((f"worker {peer}", copy))
        if self._kept.keeps(host, version):
            near.append(("the memory of its host", partial(self._kept.restore, receivers, version)))
        return near + far

    # --- from another worker ----------------------------------------------------------------------

    async def _copy_worker(
        self, receivers: Sequence[Rank], senders: Sequence[Rank], version: int, deadline: Deadline
    ) -> bool:
        """Copy the weights of all ranks of one worker to the same ranks of another.

        Returns:
            Always True, as required for a ``Copy``.

        Raises:
            SglrlError: a rank failed, so the copies of all ranks have stopped. The weights of the
                receiving worker then have no version.
        """
        by_rank = {sender.member[1]: sender for sender in senders}
        copy_id = self._questions.new_id()
        failures: list[BaseException] = []

        async def copy(receiver: Rank) -> None:
            sender = by_rank[receiver.member[1]]
            try:
                offer = await self._questions.ask(
                    sender, lambda id_: SendPeerCopy(id_, deadline.left), _offer, deadline, receiver
                )
                if failures:
                    raise WeightUpdateError("another rank could not copy its weights")
                await self._questions.ask(
                    receiver,
                    lambda id_: ReceivePeerCopy(id_, version, offer, deadline.left),
                    _received,
                    deadline,
                    sender,
                    id_=copy_id,
                )
            except BaseException as error:
                self._questions.cancel_copies(sender, receiver)
                if not failures:
                    # The other ranks may wait for this rank's engine.
                    self._questions.cancel_copies(*(r for r in receivers if r is not receiver))
                failures.append(error)
                raise

        # Wait for every rank, because a late write must not mix with the next attempt.
        await asyncio.gather(*map(copy, receivers), return_exceptions=True)
        # First raise errors that are not of sglrl, because they are defects. Then raise the first
        # failure, because it may have caused the others.
        for error in sorted(failures, key=lambda error: isinstance(error, SglrlError)):
            raise error
        return True


def _is_there(request: UpdateRequest, version: int) -> bool:
    """Return True if the files of the request exist and have not changed since the update."""
    folder = Path(request.folder)
    try:
        same = fingerprint(weight_files(folder)) == request.seen
    except (ModelError, OSError):
        same = False
    if not same:
        logger.warning("%s does not hold the weights of version %d any more", folder, version)
    return same
