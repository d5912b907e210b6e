"""The driver's record of each process that takes part in weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..core.weight_update import Member
from ..errors import WorkerLost
from ..wire.weights import RankSettings, TensorSpec


class Rank:
    """One process of a worker, from its start until the worker is lost.

    A replacement process has the same ``member`` but another ``Rank``. Code that waits for a
    process keeps its ``Rank``, so it cannot mistake the replacement for that process.

    Attributes:
        member: the indices of the worker and of the rank.
        identity: the identity of the process at the driver's router.
        hello: the first message of the process; cancelled if the process is lost before it arrives.
        lost: True once the worker is lost.
        manifest: the last manifest that the process has accepted, and the id of that message. A
            trainer sends the same manifest each time, and encoding it takes half a millisecond.
    """

    def __init__(self, member: Member, identity: bytes) -> None:
        self.member = member
        self.identity = identity
        self.hello: asyncio.Future[RankSettings] = asyncio.get_running_loop().create_future()
        self.lost = False
        self.manifest: tuple[Sequence[TensorSpec] | None, int] = (None, 0)

    @property
    def worker(self) -> int:
        return self.member[0]

    @property
    def settings(self) -> RankSettings:
        """Return the settings of the process. Call it only after ``hello`` is done."""
        return self.hello.result()

    def check(self) -> None:
        """Raise ``WorkerLost`` if the worker is lost."""
        if self.lost:
            raise lost_error(self.worker)

    def lose(self) -> None:
        self.lost = True
        self.hello.cancel()


def lost_error(worker: int) -> WorkerLost:
    return WorkerLost(f"worker {worker} was lost", worker=worker)
