"""The methods of ``Client`` that control the workers and their engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..config import check_target, positive
from ..driver.driver import Driver
from ..driver.pool import Birth, Pool
from .engine_controls import Controls, WorkerStats


class ControlMethods:
    """See ``Client``, which sets these attributes."""

    _controls: Controls
    _pool: Pool
    _more: Callable[[int, list[Birth]], list[Birth]] | None

    def _running(self, *, urgent: bool = False) -> Driver:
        raise NotImplementedError

    async def stats(self) -> list[WorkerStats]:
        """What every live engine reports of itself, in worker order."""
        self._running(urgent=True)
        return await self._controls.stats()

    async def flush_cache(self) -> bool:
        """Empty every worker's prefix cache. False if some worker had requests and kept it."""
        self._running(urgent=True)
        return await self._controls.flush_cache()

    async def broadcast(
        self, endpoint: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call one of the engines' control endpoints (``stats``, ``flush_cache``, ...) on every
        worker that serves; the results in worker order.

        Raises:
            UnknownEndpoint: there is none of that name.
        """
        self._running(urgent=True)
        return await self._controls.broadcast(endpoint, args, kwargs, timeout)

    async def pause(
        self,
        mode: Literal["in_place", "retract", "abort"] = "in_place",
        *,
        timeout: float | None = 60.0,
    ) -> None:
        """Stop all engines between two steps. Calls may still be made, and wait; deadlines go on
        counting, and weights may be updated (with inflight="drain" when ``resume`` was called, as
        nothing ends before). A worker that comes later is paused too. Pausing twice is harmless.
        It stays so until ``resume``, also if the client was in another process that is gone.

        Args:
            mode: what becomes of running ``generate`` calls. "in_place": they keep their KV cache,
                and go on with it after ``resume``; "retract": they give it back, and it is computed
                again after ``resume``; "abort": they return what they have, with finish_reason
                "abort", and other calls are computed again after ``resume``.
            timeout: seconds that an engine may take.

        Raises:
            DeadlineExceeded: an engine was not paused in time; call ``resume``, or pause again.
        """
        self._running(urgent=True)
        await self._controls.pause(mode, timeout)

    async def resume(self, *, timeout: float | None = 60.0) -> None:
        """Let the engines go on after ``pause``. Without one: nothing.

        Raises:
            DeadlineExceeded: an engine did not say within ``timeout`` seconds that it does.
        """
        self._running(urgent=True)
        await self._controls.resume(timeout)

    async def abort(self, *, worker: int | None = None, timeout: float | None = 60.0) -> int:
        """End all ``generate`` calls and streams that have been made, also those that wait: each
        returns what it has, with finish_reason "abort"; a session's turn then goes on. To be rid of
        one call, cancel its task.

        Args:
            worker: only what this worker holds, or is pinned to it.
            timeout: seconds that an engine may take to say how many they are.

        Returns:
            how many they were.

        Raises:
            UsageError: there is no such worker.
            WorkerLost: that worker is lost.
        """
        self._running(urgent=True)
        check_target(0, worker, None)
        return await self._controls.abort(worker, timeout)

    async def add_workers(self, n: int = 1) -> list[int]:
        """Start ``n`` more workers, with the same arguments; returns their ids when they serve,
        with the current weights.

        Raises:
            NotEnoughDevices: no GPUs are left for them.
            WorkerStartError: one failed; none of the new ones is left.
        """
        self._running()
        assert self._more is not None
        return await self._pool.add(self._more(positive("n", n), self._pool.births))

    async def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """Wait until all workers serve that have not been removed or retired: after a loss, until
        the replacement does.

        Raises:
            DeadlineExceeded: some do not within ``timeout`` seconds; says which.
            WorkerLost: none is left.
        """
        self._running()
        await self._pool.full(timeout)

    async def remove_worker(self, worker: int, *, timeout: float | None = 600.0) -> None:
        """Let a worker finish the calls it has, then end it; it gets no new ones. What it has not
        finished after ``timeout`` seconds goes on at others, from the tokens that it had.

        Raises:
            UsageError: there is no such worker, or it is the last one.
        """
        self._running()
        await self._pool.remove(worker, timeout)
