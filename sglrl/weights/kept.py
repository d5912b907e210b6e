"""Copies of the current weights in the memory of hosts.

This is the driver's side of ``workers/weights/kept_weights.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from ..errors import SglrlError
from ..wire.weights import CancelCopy, KeepWeights, RestoreWeights, ToRank
from .answers import body_of
from .deadline import Deadline
from .questions import Questions
from .ranks import Rank, Ranks

logger = logging.getLogger("sglrl.weights")

T = TypeVar("T")

_size = msgspec.msgpack.Decoder(int)
_found = msgspec.msgpack.Decoder(bool)


class Kept:
    """The kept weights of a pool. On each host, one worker copies its weights.

    Args:
        host: ``host(worker)`` returns the name of the worker's host.

    Attributes:
        sizes: bytes that the latest copies of each worker hold in the memory of its host.
    """

    def __init__(self, ranks: Ranks, questions: Questions, host: Callable[[int], str]) -> None:
        self._ranks = ranks
        self._questions = questions
        self._host = host
        self._versions: dict[str, int] = {}
        """The version that each host keeps."""
        self._refusals: set[tuple[int, str]] = set()
        """Workers with errors that were logged. Later updates often have the same errors."""
        self.sizes: dict[int, int] = {}

    async def keep(self, holders: Sequence[Rank], version: int, deadline: Deadline) -> None:
        """Let each host keep the current weights. The caller holds the lock of updates.

        Args:
            holders: all ranks of the workers that have the current weights.
            version: of the current weights.
        """
        hosts: dict[str, dict[int, list[Rank]]] = {}
        for rank in holders:
            workers = hosts.setdefault(self._host(rank.worker), {})
            workers.setdefault(rank.worker, []).append(rank)
        await asyncio.gather(
            *(
                self._keep_on(host, workers, version, deadline)
                for host, workers in hosts.items()
                if self._versions.get(host) != version
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
            self._versions[host] = version
            logger.info(
                "worker %d keeps version %d in %.2f GB of its host's memory",
                worker,
                version,
                sum(sizes) / 1e9,
            )
            return

    def _forget(self, host: str) -> None:
        self._versions.pop(host, None)
        for worker in [worker for worker in self.sizes if self._host(worker) == host]:
            del self.sizes[worker]

    def forget_all(self) -> None:
        """Do not use any copy: a part of the weights has changed since, with the same version."""
        self._versions.clear()
        self.sizes.clear()

    def keeps(self, host: str, version: int) -> bool:
        """Return whether a host keeps this version."""
        return self._versions.get(host) == version

    def is_kept(self, version: int) -> bool:
        """Return whether any host keeps this version."""
        return version in self._versions.values()

    async def restore(self, receivers: Sequence[Rank], version: int, deadline: Deadline) -> bool:
        """Load the kept weights into all ranks of a worker. The caller holds the lock of updates.

        Returns:
            False if the host does not keep them any more.

        Raises:
            SglrlError: a rank failed. The worker then has weights of no version.
        """
        found = await self._ask(
            receivers, lambda id_: RestoreWeights(id_, version, deadline.left), _found, deadline
        )
        if not all(found):
            # The host's fork server has ended, and its memory with it.
            self._forget(self._host(receivers[0].worker))
        return all(found)

    async def _ask(
        self,
        ranks: Sequence[Rank],
        make: Callable[[int], ToRank],
        decoder: msgspec.msgpack.Decoder[T],
        deadline: Deadline,
    ) -> list[T]:
        """Ask all ranks, and return their answers. When one of them fails, all stop."""
        asked = [asyncio.ensure_future(self._questions.ask(rank, make, deadline)) for rank in ranks]
        try:
            answers = await asyncio.gather(*asked)
        except BaseException:
            for question in asked:
                question.cancel()
            for rank in ranks:
                self._ranks.send(rank, CancelCopy())
            raise
        return [body_of(decoder, answer) for answer in answers]
