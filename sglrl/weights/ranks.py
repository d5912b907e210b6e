"""The driver's records of the worker processes that take part in weight updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..core.driver_listener import DriverListener
from ..core.fabric import Fabric
from ..core.weight_update import Member
from ..errors import UsageError, WeightUpdateError, WorkerLost
from ..wire.codec import Buffer, encode
from ..wire.weights import RankSettings, TensorSpec, ToRank
from .deadline import Deadline


class DriverPort(Protocol):
    """The parts of ``Driver`` that a weight channel uses."""

    fabric: Fabric

    def add_listener(self, listener: DriverListener) -> None: ...

    def change(self) -> asyncio.Future[None]: ...

    def send_to_peer(self, identity: bytes, *frames: Buffer) -> bool: ...


class Rank:
    """One process of a worker, from its start until the worker is lost or away.

    A worker is away while its connection is broken and the worker may return. Its process then has
    a new ``Rank`` with the same identity. A replacement process has a new ``Rank`` with the same
    ``member``. Code that waits for a process keeps the ``Rank`` of that process, so it never
    mistakes a later ``Rank`` for this one.

    Attributes:
        member: the indices of the worker and of the rank.
        identity: the identity of the process at the driver's router.
        returns: whether this ``Rank`` is for a process that is away and may return.
        hello: the first message of the process. The future is cancelled if the process is lost
            before the message arrives.
        connection: the serial number of the connection on which ``hello`` arrived.
        lost: whether the worker is lost or away.
        manifest: the last manifest that the process has accepted, and the id of its message. If the
            next manifest is the same object, only the id is sent, because encoding the manifest
            takes half a millisecond.
    """

    def __init__(self, member: Member, identity: bytes, *, returns: bool = False) -> None:
        self.member = member
        self.identity = identity
        self.returns = returns
        self.connection = 0
        self.hello: asyncio.Future[RankSettings] = asyncio.get_running_loop().create_future()
        self.lost = False
        self.manifest: tuple[Sequence[TensorSpec] | None, int] = (None, 0)

    @property
    def worker(self) -> int:
        return self.member[0]

    @property
    def settings(self) -> RankSettings:
        """The settings of the process. Available only after ``hello`` is done."""
        return self.hello.result()

    def check(self) -> None:
        """Raise ``WorkerLost`` if the worker is lost."""
        if self.lost:
            raise lost_error(self.worker)

    def lose(self) -> None:
        self.lost = True
        self.hello.cancel()


class Ranks:
    """The ranks of a pool that are not lost.

    Args:
        is_up: ``is_up(worker)`` returns True if the worker has reported ready and is not lost.

    Attributes:
        expel: ``expel(worker, reason)`` kills a worker's processes.
        host: ``host(worker)`` returns the name of the worker's host.
        last_id: the last id that ``new_id`` has returned.
    """

    def __init__(
        self,
        expel: Callable[[int, str], None],
        is_up: Callable[[int], bool],
        host: Callable[[int], str],
    ) -> None:
        self.expel = expel
        self.host = host
        self.last_id = 0
        self._is_up = is_up
        self._driver: DriverPort | None = None
        self._by_member: dict[Member, Rank] = {}
        self._by_identity: dict[bytes, Rank] = {}
        self._past: set[bytes] = set()
        """Identities of lost ranks. Their last messages may arrive after the loss."""
        self._has_weights = False
        """Whether a rank was ever added. Otherwise the engine has no weights to update."""

    def attach(self, driver: DriverPort) -> None:
        self._driver = driver

    def add(self, member: Member, identity: bytes, *, returns: bool = False) -> None:
        rank = Rank(member, identity, returns=returns)
        self._by_member[member] = self._by_identity[identity] = rank
        self._has_weights = True

    def lose(self, worker: int) -> list[Rank]:
        """Remove the ranks of a lost worker and return them."""
        lost = self.of(worker)
        for rank in lost:
            del self._by_member[rank.member], self._by_identity[rank.identity]
            self._past.add(rank.identity)
            rank.lose()
        return lost

    def close(self) -> None:
        """Cancel all waits for a ``RankHello``."""
        for rank in self._by_member.values():
            rank.hello.cancel()

    def find(self, identity: bytes) -> Rank | None:
        return self._by_identity.get(identity)

    def was_lost(self, identity: bytes) -> bool:
        """Return True for the identity of a rank that is lost."""
        return identity in self._past

    def of(self, worker: int) -> list[Rank]:
        return [rank for rank in self._by_member.values() if rank.worker == worker]

    @property
    def up(self) -> list[Rank]:
        """The ranks of all workers that are up.

        A worker that is still starting gets the weights once it is up: see ``WeightChannel.sync``.
        """
        return [rank for _, rank in sorted(self._by_member.items()) if self._is_up(rank.worker)]

    def new_id(self) -> int:
        """Return an id for a message to ranks."""
        self.last_id += 1
        return self.last_id

    def send(self, rank: Rank, message: ToRank) -> None:
        """Send a message to a rank, unless the rank is lost."""
        if not rank.lost and self._driver is not None:
            self._driver.send_to_peer(rank.identity, encode(message))

    async def greeted(self, deadline: Deadline) -> list[Rank]:
        """Wait until a worker is up, and return the ranks of all workers that are up.

        Also wait until each of these ranks has sent ``RankHello``. Leave out ranks that are lost.

        Raises:
            UsageError: the engine has no weights to update.
            WorkerLost: no worker is left.
            WeightUpdateError: within the deadline, no worker was up, or a rank sent no
                ``RankHello``.
        """
        if not self._has_weights:
            raise UsageError("this engine has no weights to update: engine='sglang' has")
        try:
            async with deadline.limit():
                ranks = await self.some_up()
        except TimeoutError:
            raise WeightUpdateError(f"no worker was up within {deadline}") from None
        await all_said_hello(ranks, deadline)
        return [rank for rank in ranks if not rank.lost]

    async def some_up(self) -> list[Rank]:
        """Wait until a worker is up, and return every rank of every worker that is up.

        The wait has no deadline of its own. The pool limits the number of replacements and the time
        in which each must start, so after a while a worker is up or none is left.

        Raises:
            WorkerLost: no worker is left.
        """
        driver = self._driver
        while not (ranks := self.up):
            if driver is None or not driver.fabric.alive:
                raise WorkerLost("no worker is left")
            await driver.change()
        return ranks


async def all_said_hello(ranks: Iterable[Rank], deadline: Deadline) -> None:
    """Wait until each rank has sent ``RankHello`` or is lost.

    Raises:
        WeightUpdateError: a rank did not send ``RankHello`` in time and is not lost.
    """
    waiting = [rank.hello for rank in ranks if not rank.hello.done()]
    if waiting:
        await asyncio.wait(waiting, timeout=deadline.left)
        if any(not hello.done() for hello in waiting):
            raise WeightUpdateError(f"not every rank was there within {deadline}")


def check_alive(ranks: Iterable[Rank]) -> None:
    """Raise ``WorkerLost`` if the worker of one of these ranks is lost."""
    for rank in ranks:
        rank.check()


def lost_error(worker: int) -> WorkerLost:
    return WorkerLost(f"worker {worker} was lost", worker=worker)
