"""Keep copies of the current weights in the memory of hosts, for replacements of lost workers.

This is the driver's side. ``workers/weights/kept_weights.py`` is the workers' side.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from ..errors import SglrlError
from ..wire.weights import KeepWeights, RestoreWeights, ToRank
from .deadline import Deadline
from .questions import Questions
from .ranks import Rank
from .versions import Versions

logger = logging.getLogger("sglrl.weights")

T = TypeVar("T")
KeepMode = Literal["auto", "host"] | None

_KEEP_SECONDS: Final = 120.0
"""Time limit in seconds for the hosts to copy the weights of an update."""

_size = msgspec.msgpack.Decoder(int)
_restored = msgspec.msgpack.Decoder(bool)


class Kept:
    """The kept weights of a pool. One worker on each host copies its weights.

    Args:
        mode: "auto" keeps the weights while only one worker has them. "host" always keeps them on
            each host. None never keeps them.
        host: ``host(worker)`` returns the name of the worker's host.

    Attributes:
        sizes: the size in bytes of the latest copy of each worker, by the worker's index.
    """

    def __init__(
        self, mode: KeepMode, versions: Versions, questions: Questions, host: Callable[[int], str]
    ) -> None:
        self._mode = mode
        self._versions = versions
        self._questions = questions
        self._host = host
        self._task: asyncio.Task[None] | None = None
        """The task that copies the current weights, or None."""
        self._kept: dict[str, int] = {}
        """The version that each host keeps, by the host's name."""
        self._refusals: set[tuple[int, str]] = set()
        """The worker and text of each error that was logged as a warning. Repetitions are not."""
        self.sizes: dict[int, int] = {}

    # --- when -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start to copy the current weights if that is necessary and no copy is running."""
        if (self._task is None or self._task.done()) and self._needed():
            self._task = asyncio.get_running_loop().create_task(self._keep())

    def interrupt(self) -> None:
        """Stop the running copy, because an update is about to replace the weights."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until no copy is running. Each copy has a deadline, so this wait ends."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _needed(self) -> Sequence[Rank]:
        """Return the ranks whose weights hosts must keep.

        Version 0 is never kept, because every worker loads it itself.
        """
        versions = self._versions
        if self._mode is None or versions.current == 0 or versions.asleep:
            return ()
        holders = versions.holders()
        several = len({rank.worker for rank in holders}) > 1
        return () if self._mode == "auto" and several else holders

    # --- copies -----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        # Each update and each copy has a deadline, so the wait for the lock ends.
        async with self._versions.lock:
            version, deadline = self._versions.current, Deadline(_KEEP_SECONDS)
            hosts: dict[str, dict[int, list[Rank]]] = {}
            for rank in self._needed():
                workers = hosts.setdefault(self._host(rank.worker), {})
                workers.setdefault(rank.worker, []).append(rank)
            await asyncio.gather(
                *(
                    self._keep_on(host, workers, version, deadline)
                    for host, workers in hosts.items()
                    if self._kept.get(host) != version
                )
            )

    async def _keep_on(
        self, host: str, workers: dict[int, list[Rank]], version: int, deadline: Deadline
    ) -> None:
        # The worker overwrites the old copy of this host from now on.
        self._forget(host)
        for worker, ranks in sorted(workers.items()):
            try:
                sizes = await self._ask(
                    ranks, lambda id_: KeepWeights(id_, version), _size, deadline
                )
            except SglrlError as error:
                refusal = worker, str(error)
                level = logging.DEBUG if refusal in self._refusals else logging.WARNING
                self._refusals.add(refusal)
                logger.log(level, "worker %d could not keep its weights: %s", worker, error)
                continue
            self.sizes[worker] = sum(sizes)
            self._kept[host] = version
            logger.info(
                "worker %d keeps version %d in %.2f GB of its host's memory",
                worker,
                version,
                sum(sizes) / 1e9,
            )
            return

    def _forget(self, host: str) -> None:
        self._kept.pop(host, None)
        for worker in [worker for worker in self.sizes if self._host(worker) == host]:
            del self.sizes[worker]

    def forget_all(self) -> None:
        """Drop all copies, because a part of the weights has changed without a new version."""
        self._kept.clear()
        self.sizes.clear()

    def keeps(self, host: str, version: int) -> bool:
        """Return whether a host keeps this version."""
        return self._kept.get(host) == version

    def is_kept(self, version: int) -> bool:
        """Return whether any host keeps this version."""
        return version in self._kept.values()

    async def restore(self, receivers: Sequence[Rank], version: int, deadline: Deadline) -> bool:
        """Load the kept weights into all ranks of a worker. The caller holds the lock of updates.

        Returns:
            False if the host no longer has the weights.

        Raises:
            SglrlError: a rank failed. The weights of the worker then have no version.
        """
        restored = await self._ask(
            receivers, lambda id_: RestoreWeights(id_, version, deadline.left), _restored, deadline
        )
        if not all(restored):
            # The host's fork server has exited, and its memory was freed.
            self._forget(self._host(receivers[0].worker))
            if any(restored):
                # The hold of the other ranks also stops the engines of these ranks.
                self._questions.cancel_copies(*receivers)
        return all(restored)

    async def _ask(
        self,
        ranks: Sequence[Rank],
        make: Callable[[int], ToRank],
        decoder: msgspec.msgpack.Decoder[T],
        deadline: Deadline,
    ) -> list[T]:
        """Send a question to all ranks, and return the answers. If one rank fails, all stop."""
        id_ = self._questions.new_id()
        asked = [
            asyncio.ensure_future(self._questions.ask(rank, make, decoder, deadline, id_=id_))
            for rank in ranks
        ]
        try:
            return await asyncio.gather(*asked)
        except BaseException:
            for question in asked:
                question.cancel()
            self._questions.cancel_copies(*ranks)
            raise
