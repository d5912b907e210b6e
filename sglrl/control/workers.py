"""Add, remove and await the workers of a pool."""

from __future__ import annotations

from ..config import positive
from ..driver.pool import Pool
from ..driver.worker_info import QueueInfo, WorkerInfo
from .client_base import ClientBase
from .operations import operation


class WorkerMethods(ClientBase):
    """The methods of ``Client`` that add, remove and describe its workers.

    Methods that start or stop processes have no HTTP endpoint.
    """

    @property
    def workers(self) -> list[WorkerInfo]:
        """The id, pid, state, weights version, device and load of every worker."""
        return self.pool.workers

    @property
    def queue(self) -> QueueInfo:
        """The number of calls that wait at the driver, their bytes and the number of clients.

        A client of ``sglrl.connect`` returns the last report of the pool. The pool sends at most
        one report every 0.1 s.
        """
        return self.pool.queue

    @operation(http=False)
    async def add_workers(self, n: int = 1) -> list[int]:
        """Start ``n`` more workers with the same arguments.

        Returns:
            The ids of the new workers, once they serve with the current weights.

        Raises:
            NotEnoughDevices: not enough GPUs are free.
            WorkerStartError: a worker failed to start. None of the new workers remains.
        """
        return await self._control.part(Pool).add(positive("n", n))

    @operation
    async def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """Wait until all workers serve, except removed and retired ones.

        After the loss of a worker, this waits until its replacement serves.

        Raises:
            DeadlineExceeded: a worker does not serve within ``timeout`` seconds. The error names
                the workers.
            WorkerLost: no worker is left.
        """
        await self._control.part(Pool).full(timeout)

    @operation(http=False)
    async def remove_worker(self, worker: int, *, timeout: float | None = 600.0) -> None:
        """Wait until a worker has finished its calls, then stop it. It receives no new calls.

        Calls that are unfinished after ``timeout`` seconds continue on other workers, from the
        tokens sampled so far.

        Raises:
            UsageError: there is no such worker, or it is the last worker.
        """
        await self._control.part(Pool).ending.remove(worker, timeout)

    @operation(http=False)
    async def restart_worker(self, worker: int, *, timeout: float | None = 600.0) -> None:
        """Wait until a worker has finished its calls, then kill it, so that a replacement starts.

        The worker receives no new calls meanwhile, and calls that are pinned to it fail. Calls that
        are unfinished after ``timeout`` seconds continue on other workers. The restart counts
        towards the limit ``restarts`` of ``launch``. ``wait_until_full`` waits for the replacement.

        Raises:
            UsageError: there is no such worker, or it is being removed or replaced already.
        """
        await self._control.part(Pool).ending.restart(worker, timeout)

    @operation(http=False, urgent=True)
    async def kill_worker(self, worker: int) -> None:
        """Kill a worker with SIGKILL. Its calls continue on other workers; a replacement starts.

        This counts towards the limit ``restarts`` of ``launch``.

        Raises:
            UsageError: there is no such worker, or it is lost or retired already.
        """
        self._control.part(Pool).ending.kill(worker)

    @operation(http=False, urgent=True)
    async def worker_stacks(self, worker: int) -> str:
        """Return the stacks of all threads of a worker's processes, as Python's faulthandler does.

        The result is "" if the worker cannot write them, because it is stopped.

        Raises:
            UsageError: there is no such worker, or it has no process now.
        """
        return await self._control.part(Pool).ending.stacks(worker)
