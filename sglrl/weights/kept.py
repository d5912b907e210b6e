"""Copies of the current weights in hosts' memory, so that a lost worker does not take them with it.

This is the driver's side of ``workers/weights/kept_weights.py``.
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
"""Seconds for the hosts to keep the weights of an update."""

_size = msgspec.msgpack.Decoder(int)
_restored = msgspec.msgpack.Decoder(bool)


class Kept:
    """The kept weights of a pool. On each host, one worker copies its weights.

    Args:
        mode: "auto": a host keeps the weights while only one worker has them. "host": each host
            keeps them. None: no host does.
        host: ``host(worker)`` returns the name of the worker's host.

    Attributes:
        sizes: bytes that the latest copies of each worker hold in the memory of its host.
    """

    def __init__(
        self, mode: KeepMode, versions: Versions, questions: Questions, host: Callable[[int], str]
    ) -> None:
        self._mode = mode
        self._versions = versions
        self._questions = questions
        self._host = host
        self._task: asyncio.Task[None] | None = None
        """Copies the current weights."""
        self._kept: dict[str, int] = {}
        """The version that each host keeps."""
        self._refusals: set[tuple[int, str]] = set()
        """Workers with errors that were logged. Later updates often have the same errors."""
        self.sizes: dict[int, int] = {}

    # --- when -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let hosts keep the current weights if they must, once no update or copy runs."""
        if (self._task is None or self._task.done()) and self._needed():
            self._task = asyncio.get_running_loop().create_task(self._keep())

    def interrupt(self) -> None:
        """Stop the copy that runs, because an update is about to replace the weights."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until no copy runs. Each copy has a deadline, so this wait ends."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _needed(self) -> Sequence[Rank]:
        """Return the ranks whose weights hosts must keep.

        Every worker loads version 0 itself when it starts.
        """
        versions = self._versions
        if self._mode is None or versions.current == 0 or versions.asleep:
            return ()
        holders = versions.holders()
        several = len({rank.worker for rank in holders}) > 1
        return () if self._mode == "auto" and several else holders

    # --- copies -----------------------------------------------------------------------------------

    async def _keep(self) -> None:
        # Each update and each copy has a deadline, so this wait ends.
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
        # The copy is overwritten from now on.
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
        """Do not use any copy: a part of the weights has changed since, with the same version."""
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
            False if the host does not keep them any more.

        Raises:
            SglrlError: a rank failed. The worker then has weights of no version.
        """
        restored = await self._ask(
            receivers, lambda id_: RestoreWeights(id_, version, deadline.left), _restored, deadline
        )
        if not all(restored):
            # The host's fork server has ended, and its memory with it.
            self._forget(self._host(receivers[0].worker))
        return all(restored)

    async def _ask(
        self,
        ranks: Sequence[Rank],
        make: Callable[[int], ToRank],
        decoder: msgspec.msgpack.Decoder[T],
        deadline: Deadline,
    ) -> list[T]:
        """Ask all ranks, and return their answers. When one of them fails, all stop."""
        asked = [
            asyncio.ensure_future(self._questions.ask(rank, make, decoder, deadline))
            for rank in ranks
        ]
        try:
            return await asyncio.gather(*asked)
        except BaseException:
            for question in asked:
                question.cancel()
            self._questions.cancel_copies(*ranks)
            raise
