"""Pause and resume the engines of a pool, and abort their calls."""

from __future__ import annotations

from typing import Literal, Protocol

from ..actors.actor import endpoint, endpoints_of
from ..config import check_target, check_timeout
from ..core.driver_listener import DriverListener
from ..driver.port import PoolPort
from ..errors import InvalidRequest, UsageError
from ..wire.codec import encode
from ..wire.engine import PAUSE_MODES, TokenChunk
from .client_base import ClientBase
from .engine_calls import ask_all, tell
from .operations import operation


class PauseEndpoints(Protocol):
    """Endpoints of an engine worker. Only ``PoolPausing`` calls them: it records the state.

    They are not idempotent, so calls are not retried on a replacement worker. ``before_serving``
    pauses a replacement when it starts to serve.
    """

    @endpoint
    async def pause(self, mode: str) -> None: ...

    @endpoint
    async def resume(self) -> None: ...

    @endpoint
    async def abort(self) -> int: ...


_ENDPOINTS = endpoints_of(PauseEndpoints)


class PauseMethods(ClientBase):
    """The methods of ``Client`` that pause, resume and abort."""

    @operation(urgent=True)
    async def pause(
        self,
        mode: Literal["in_place", "retract", "abort", "drain"] = "in_place",
        *,
        timeout: float | None = 60.0,
    ) -> None:
        """Stop all engines between two steps.

        New calls are accepted and wait. Deadlines keep running. Weights may be updated. An update
        with inflight="drain" waits for ``resume``, because calls do not finish before ``resume``. A
        worker that starts later is paused too. Pausing twice is harmless. The engines stay paused
        until ``resume``, even if the client was in another process that has exited.

        Args:
            mode: the treatment of running ``generate`` calls.
                "in_place": they keep their KV cache and continue with it after ``resume``.
                "retract": they free their KV cache, and it is recomputed after ``resume``.
                "abort": they return their tokens so far, with finish_reason "abort". Other calls
                are recomputed after ``resume``.
                "drain": the engines first finish all calls that they have received, of every kind.
                Calls of a worker that is lost meanwhile continue after ``resume``. An engine that
                is already paused stays paused and finishes no calls.
            timeout: seconds that an engine may take to pause. With "drain", this includes the time
                to finish its calls.

        Raises:
            DeadlineExceeded: an engine was not paused in time. Call ``resume``, or pause again.
                With "drain", the engine still finishes its calls and then pauses.
        """
        await self._control.part(PoolPausing).pause(mode, timeout)

    @operation(urgent=True)
    async def resume(self, *, timeout: float | None = 60.0) -> None:
        """Resume the engines after ``pause``. Do nothing if they are not paused.

        Args:
            timeout: seconds that an engine may take to confirm that it runs.

        Raises:
            DeadlineExceeded: an engine did not confirm within ``timeout`` seconds.
        """
        await self._control.part(PoolPausing).resume(timeout)

    @operation(urgent=True)
    async def abort(self, *, worker: int | None = None, timeout: float | None = 60.0) -> int:
        """Abort all pending ``generate`` calls and streams, including the waiting ones.

        Each call returns its tokens so far, with finish_reason "abort". A session continues its
        turn afterwards. To cancel a single call, cancel its task.

        Args:
            worker: abort only the calls that this worker holds or that are pinned to it.
            timeout: seconds that an engine may take to report its number of aborted calls.

        Returns:
            The number of aborted calls.

        Raises:
            UsageError: there is no such worker.
            WorkerLost: the worker is lost.
        """
        check_target(0, worker, None)
        return await self._control.part(PoolPausing).abort(worker, timeout)


class PoolPausing(DriverListener):
    """Pauses the engines of this process's pool.

    A worker that starts to serve while the pool is paused is paused too.
    """

    def __init__(self, pool: PoolPort) -> None:
        self._pool = pool
        self._paused = False

    def start(self) -> None:
        self._pool.driver.add_listener(self)

    async def pause(self, mode: str, timeout: float | None) -> None:
        if mode not in PAUSE_MODES:
            raise UsageError(f"mode must be one of {PAUSE_MODES}, got {mode!r:.200}")
        check_timeout(timeout)
        before, self._paused = self._paused, True
        self._hold()
        try:
            await ask_all(self._pool.driver, _ENDPOINTS["pause"], (mode,), timeout=timeout)
        except InvalidRequest:
            # The engine does not have this mode.
            self._paused = before
            self._hold()
            raise

    async def resume(self, timeout: float | None) -> None:
        check_timeout(timeout)
        self._paused = False
        await ask_all(self._pool.driver, _ENDPOINTS["resume"], timeout=timeout)
        self._hold()

    def _hold(self) -> None:
        reason = "generation is paused (client.pause); await client.resume()"
        self._pool.driver.hold("pause", reason if self._paused else None)

    async def abort(self, worker: int | None, timeout: float | None) -> int:
        check_timeout(timeout)
        body = encode(TokenChunk(b"", finish="abort", version=self._pool.weights.version))
        # Answer waiting calls first. Otherwise they would be sent when aborted calls free a place.
        driver = self._pool.driver
        waiting = driver.fabric.answer_waiting("generate", body, worker)
        driver.flush_soon()
        ended = await ask_all(driver, _ENDPOINTS["abort"], timeout=timeout, worker=worker)
        return waiting + sum(map(int, ended.values()))

    def before_serving(self, worker: int) -> None:
        if self._paused:
            tell(self._pool.driver, _ENDPOINTS["pause"], ("in_place",), worker)
