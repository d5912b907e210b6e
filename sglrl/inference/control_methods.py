"""The methods of ``Client`` that control the workers and their engines."""

from __future__ import annotations

from typing import Any, Literal

from ..config import check_target, positive
from ..driver.worker_info import QueueInfo
from ..errors import UnknownEndpoint
from .client_base import ClientBase
from .engine_controls import ENDPOINTS, Pausing, WorkerStats, ask_all


class ControlMethods(ClientBase):
    """The control methods of ``Client``. The client sets these attributes."""

    _pausing: Pausing
    _timeout: float | None

    @property
    def queue(self) -> QueueInfo:
        """The calls of all clients that wait at the driver: ``calls``, ``bytes``, ``clients``.

        A client of ``sglrl.connect`` returns the last report of the pool. The pool sends one at
        most every 0.1 s.
        """
        return self._pool.queue

    async def stats(self) -> list[WorkerStats]:
        """Return the statistics of every live engine, in worker order."""
        found = await self._ask_all("stats")
        return [WorkerStats(worker=w, engine=s) for w, s in found.items()]

    async def flush_cache(self) -> bool:
        """Empty every worker's prefix cache.

        Returns:
            False if a worker kept its cache because it had requests.
        """
        return all((await self._ask_all("flush_cache")).values())

    async def broadcast(
        self, endpoint: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a control endpoint of the engines (``stats``, ``flush_cache``, ...) on every worker.

        Only workers that serve are called.

        Returns:
            The results in worker order.

        Raises:
            UnknownEndpoint: no endpoint has this name.
        """
        return [*(await self._ask_all(endpoint, args, kwargs, timeout)).values()]

    async def _ask_all(
        self,
        endpoint: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> dict[int, Any]:
        """Call a control endpoint with the client's timeout as the default. See ``ask_all``."""
        driver = self._running(urgent=True)
        spec = ENDPOINTS.get(endpoint)
        if spec is None:
            raise UnknownEndpoint(
                f"the engines declare no endpoint {endpoint!r} to be called on all of them "
                f"(endpoints: {', '.join(sorted(ENDPOINTS))})"
            )
        timeout = self._timeout if timeout is None else timeout
        return await ask_all(driver, spec, args, kwargs, timeout)

    async def pause(
        self,
        mode: Literal["in_place", "retract", "abort", "drain"] = "in_place",
        *,
        timeout: float | None = 60.0,
    ) -> None:
        """Stop all engines between two steps.

        New calls are accepted and wait. Deadlines keep running. Weights may be updated; an update
        with inflight="drain" waits for ``resume``, because no call finishes before. A worker that
        starts later is paused too. Pausing twice is harmless. The engines stay paused until
        ``resume``, even if the client was in another process that has exited.

        Args:
            mode: the treatment of running ``generate`` calls.
                "in_place": they keep their KV cache and continue with it after ``resume``.
                "retract": they free their KV cache, and it is recomputed after ``resume``.
                "abort": they return their tokens so far, with finish_reason "abort". Other calls
                are recomputed after ``resume``.
                "drain": the engines finish them first, and all other calls that they have received.
                Calls of a worker that is lost meanwhile continue after ``resume``. In an engine
                that is paused, nothing finishes: it stays paused as it is.
            timeout: seconds that an engine may take, with "drain" until its calls have finished.

        Raises:
            DeadlineExceeded: an engine was not paused in time. Call ``resume``, or pause again.
                After "drain", engines go on to finish their calls, and pause then.
        """
        self._running(urgent=True)
        await self._pausing.pause(mode, self._timeout if timeout is None else timeout)

    async def resume(self, *, timeout: float | None = 60.0) -> None:
        """Resume the engines after ``pause``. Do nothing if they are not paused.

        Args:
            timeout: seconds that an engine may take to confirm.

        Raises:
            DeadlineExceeded: an engine did not confirm within ``timeout`` seconds.
        """
        self._running(urgent=True)
        await self._pausing.resume(self._timeout if timeout is None else timeout)

    async def abort(self, *, worker: int | None = None, timeout: float | None = 60.0) -> int:
        """Abort all pending ``generate`` calls and streams, including the waiting ones.

        Each returns its tokens so far, with finish_reason "abort". A session continues its turn
        afterwards. To cancel a single call, cancel its task.

        Args:
            worker: abort only the calls that this worker holds or that are pinned to it.
            timeout: seconds that an engine may take to report its number of aborted calls.

        Returns:
            The number of aborted calls.

        Raises:
            UsageError: there is no such worker.
            WorkerLost: the worker is lost.
        """
        self._running(urgent=True)
        check_target(0, worker, None)
        return await self._pausing.abort(worker, self._timeout if timeout is None else timeout)

    async def add_workers(self, n: int = 1) -> list[int]:
        """Start ``n`` more workers with the same arguments.

        Returns:
            The ids of the new workers, once they serve with the current weights.

        Raises:
            NotEnoughDevices: not enough GPUs are free.
            WorkerStartError: a worker failed to start. None of the new workers remains.
        """
        self._running()
        return await self._pool.add(positive("n", n))

    async def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """Wait until all workers serve, except removed and retired ones.

        After the loss of a worker, this waits until its replacement serves.

        Raises:
            DeadlineExceeded: a worker does not serve within ``timeout`` seconds. The error names
                the workers.
            WorkerLost: no worker is left.
        """
        self._running()
        await self._pool.full(timeout)

    async def remove_worker(self, worker: int, *, timeout: float | None = 600.0) -> None:
        """Wait until a worker has finished its calls, then stop it. It receives no new calls.

        Calls that are unfinished after ``timeout`` seconds continue on other workers, from the
        tokens sampled so far.

        Raises:
            UsageError: there is no such worker, or it is the last worker.
        """
        self._running()
        await self._pool.remove(worker, timeout)
