"""End single workers of a pool because the user asks for it: remove, restart or kill them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from ..config import check_target, check_timeout
from ..core.members import DRAINING, LOST, READY, RETIRED, Member
from ..errors import Closed, UsageError
from .driver import Driver
from .hang_monitor import DUMP_SECONDS, read_stacks
from .supervisor import Supervisor
from .worker_processes import Processes, Worker


class WorkerEnding:
    """Removes, restarts and kills workers, and shows their stacks.

    Args:
        supervisor: replaces restarted and killed workers.
        processes: ends the processes of removed workers.
        driver: returns the driver of the pool.
        shutdown_timeout: seconds after which a process that does not exit is killed.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        processes: Processes,
        driver: Callable[[], Driver],
        shutdown_timeout: float,
    ) -> None:
        self._supervisor = supervisor
        self._processes = processes
        self._driver = driver
        self._shutdown_timeout = shutdown_timeout

    async def remove(self, index: int, timeout: float | None) -> None:
        """Let a worker finish its calls, then shut it down.

        Calls that are not finished after ``timeout`` seconds continue on other workers, as after
        the loss of a worker. If the caller is cancelled, the removal still continues.

        Raises:
            Closed: the pool was closed during the removal.
            UsageError: the worker does not exist, is already being removed or retired, or is the
                last worker.
        """
        member = self._member(index, timeout)
        others = [m for m in self._driver().fabric.members.values() if m is not member]
        if all(m.state in (DRAINING, RETIRED) for m in others):
            raise UsageError(f"worker {index} is the last one; close the pool instead")
        worker = self._supervisor.workers[index]
        worker.returns = False
        worker.restart_in = None
        serves = member.state is READY
        if serves:
            self._driver().workers.drain(index)
        else:
            self._supervisor.dismiss(worker)
        await self._finish(self._remove(worker, serves, timeout))

    async def _remove(self, worker: Worker, serves: bool, timeout: float | None) -> None:
        """Shut down a worker when its last call has ended, or after ``timeout`` seconds."""
        if serves:
            await _drained(worker, timeout)
            self._supervisor.dismiss(worker)
        if worker.running:
            await self._processes.end([worker], self._shutdown_timeout)

    async def restart(self, index: int, timeout: float | None) -> None:
        """Let a worker finish its calls, then kill it, so that a replacement starts.

        Calls that are not finished after ``timeout`` seconds continue on other workers. If the
        caller is cancelled, the restart still continues.

        Raises:
            Closed: the pool was closed meanwhile.
            UsageError: the worker does not exist, or is being removed or replaced already.
        """
        member = self._member(index, timeout)
        if member.state is LOST:
            raise UsageError(f"worker {index} is lost, and its replacement starts already")
        worker = self._supervisor.workers[index]
        serves = member.state is READY
        if serves:
            self._driver().workers.drain(index)
        await self._finish(self._restart(worker, serves, timeout))

    async def _restart(self, worker: Worker, serves: bool, timeout: float | None) -> None:
        if serves:
            await _drained(worker, timeout)
        self._supervisor.expel(worker.index, "a client restarts it")

    def kill(self, index: int) -> None:
        """Kill a worker at once. Its calls continue on other workers, and a replacement starts.

        Raises:
            UsageError: the worker does not exist, or is lost or retired already.
        """
        member = self._known(index)
        if member.state in (LOST, RETIRED):
            raise UsageError(f"worker {index} is {member.state} already")
        self._supervisor.expel(index, "a client killed it")

    async def stacks(self, index: int) -> str:
        """Return the stacks of all threads of a worker's processes.

        The worker also writes them to its log. The result is "" if it cannot write any, because it
        is stopped or computes outside of Python.

        Raises:
            UsageError: the worker does not exist, or has no process.
        """
        self._known(index)
        if not self._supervisor.workers[index].running:
            raise UsageError(f"worker {index} has no process now")
        log, begin = self._supervisor.dump(index)
        # Nothing reports that the stacks are complete.
        await asyncio.sleep(DUMP_SECONDS)
        return read_stacks(log, begin)

    def _member(self, index: int, timeout: float | None) -> Member:
        """Return a worker that is not being removed."""
        check_timeout(timeout)
        member = self._known(index)
        if member.state in (DRAINING, RETIRED):
            raise UsageError(f"already {member.state}: worker {index}")
        return member

    def _known(self, index: int) -> Member:
        driver = self._driver()
        driver.fabric.check_open()
        driver.check_loop()
        check_target(0, index, None)
        member = driver.fabric.members.get(index)
        if member is None:
            raise UsageError(f"there is no worker {index}")
        return member

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` to its end, even if the caller is cancelled."""
        task = self._supervisor.run(work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Closed("the pool was closed") from None
            raise


async def _drained(worker: Worker, timeout: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await worker.drained.wait()
