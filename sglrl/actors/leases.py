"""Leases, which reserve one process of an actor for an episode that depends on its state."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Any, NoReturn

from ..core.members import READY, Member
from ..driver.driver import Driver
from ..errors import Closed, DeadlineExceeded, SglrlError, UsageError, WorkerLost
from .actor import EndpointSpec
from .handles import Target, WorkerHandle


class Leases:
    """The leases of one pool, and the tasks that wait for a lease, in the order of their requests.

    Invariant: if tasks wait, every worker that accepts calls has at least as many leases as the
    ``share`` of the first waiting task.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._held: Counter[Member] = Counter()
        """Number of leases of each process. Lost processes are included until their leases end."""
        self._waiting: deque[tuple[asyncio.Future[Member], int]] = deque()
        self._watching = False

    async def acquire(self, share: int, timeout: float | None) -> Member:
        """Wait for a process with fewer than ``share`` leases, lease it, and return it.

        ``ActorHandle.lease`` lists the errors.
        """
        self.driver.check_loop()
        self.driver.fabric.check_open()
        future: asyncio.Future[Member] = self.driver.loop.create_future()
        self._waiting.append((future, share))
        self._update()
        try:
            async with asyncio.timeout(timeout):
                return await future
        except BaseException as error:
            if not future.cancelled() and future.done() and future.exception() is None:
                self.release(future.result())
            else:
                future.cancel()
                self._update()
            if isinstance(error, TimeoutError) and not isinstance(error, SglrlError):
                raise DeadlineExceeded(
                    f"no worker was free for a lease within {timeout:g} s: {self._held.total()} "
                    f"leases are held, and {len(self._waiting)} others wait; spawn more replicas, "
                    "run fewer episodes at a time, or wait longer (timeout=)"
                ) from None
            raise

    def release(self, member: Member) -> None:
        self._held[member] -= 1
        if not self._held[member]:
            del self._held[member]
        self._update()

    def _update(self) -> None:
        """Serve the waiting tasks. If no worker will ever be free, end their wait with an error."""
        fabric = self.driver.fabric
        if fabric.closed or not fabric.alive:
            for future, _ in self._waiting:
                if not future.done():
                    future.set_exception(
                        Closed("the pool was closed")
                        if fabric.closed
                        else WorkerLost(f"no worker is left in this pool: {fabric.last_loss}")
                    )
            self._waiting.clear()
        self._grant()
        if self._waiting and not self._watching:
            self._watching = True
            self.driver.change().add_done_callback(self._on_change)

    def _on_change(self, change: asyncio.Future[None]) -> None:
        self._watching = False
        self._update()

    def _grant(self) -> None:
        while self._waiting:
            future, share = self._waiting[0]
            if not future.done():
                free = [
                    member
                    for member in self.driver.fabric.members.values()
                    if member.state is READY and self._held[member] < share
                ]
                if not free:
                    return
                member = min(free, key=lambda member: (self._held[member], member.load))
                self._held[member] += 1
                future.set_result(member)
            self._waiting.popleft()


class Lease:
    """A lease: ``async with handle.lease() as worker`` gives a ``WorkerHandle`` of one process."""

    def __init__(
        self,
        leases: Leases,
        specs: dict[str, EndpointSpec],
        owner: str,
        share: int,
        timeout: float | None,
    ) -> None:
        self._leases = leases
        self._specs = specs
        self._owner = owner
        self._share = share
        self._timeout = timeout
        self._entered = False
        self._target: Target | None = None

    async def __aenter__(self) -> WorkerHandle:
        if self._entered:
            raise UsageError("this lease was entered before; call lease() for each episode")
        self._entered = True
        member = await self._leases.acquire(self._share, self._timeout)
        self._target = Target(member.index, member)
        return WorkerHandle(self._leases.driver, self._specs, self._owner, self._target)

    async def __aexit__(self, *exc: object) -> None:
        target = self._target
        assert target is not None
        target.end(
            self._leases.driver, f"the lease of worker {target.worker} has ended before this"
        )
        assert target.member is not None
        self._leases.release(target.member)

    def __enter__(self) -> NoReturn:
        raise UsageError("use 'async with': a lease may wait for a free worker")

    def __exit__(self, *exc: object) -> None: ...

    def __await__(self) -> NoReturn:
        raise UsageError("a lease must end: use 'async with handle.lease() as worker'")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"the lease has not begun: use 'async with handle.lease() as worker', then "
            f"worker.{name}(...)"
        )
