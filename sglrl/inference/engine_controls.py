"""Control the engines: read their statistics, flush caches, pause, resume and abort."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw

from ..actors.actor import Actor as _Actor
from ..actors.actor import EndpointSpec, deadline_from, endpoint, endpoints_of
from ..actors.replies import UnaryReply
from ..config import check_timeout
from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..driver.driver import Driver
from ..driver.gathering import submit_all
from ..driver.port import PoolPort
from ..errors import Closed, InvalidRequest, UsageError, WorkerLost
from ..wire.codec import encode
from ..wire.engine import PAUSE_MODES, EngineStats, TensorValue, TokenChunk

_FIRST: Final = 1 << 62
"""Priority of control calls, which are sent to a worker before all other calls."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The ``EngineStats`` of one worker, with the index of the worker."""

    worker: int
    engine: EngineStats


class _Engine(_Actor):
    """The unary control endpoints of an engine worker, which the worker's mailbox serves."""

    @endpoint(idempotent=True)
    async def stats(self) -> EngineStats:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint(idempotent=True)
    async def flush_cache(self) -> bool:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint(idempotent=True)
    async def server_info(self) -> dict[str, Any]:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint
    async def start_profile(
        self, folder: str, activities: tuple[str, ...], with_stack: bool, record_shapes: bool
    ) -> list[str]:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint
    async def stop_profile(self) -> list[str]:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint(idempotent=True)
    async def get_weights(self, names: list[str]) -> list[TensorValue]:
        raise NotImplementedError  # served by workers/mailbox.py


class _Pausing(_Actor):
    """Control endpoints that callers cannot use by name, because ``Pausing`` tracks the state.

    They are not idempotent, so calls are not retried on a replacement worker. ``before_serving``
    pauses a replacement when it starts to serve.
    """

    @endpoint
    async def pause(self, mode: str) -> None:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint
    async def resume(self) -> None:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint
    async def abort(self) -> int:
        raise NotImplementedError  # served by workers/mailbox.py


ENDPOINTS: Final[dict[str, EndpointSpec]] = endpoints_of(_Engine)
"""The endpoints that ``Client.broadcast`` may call by name."""
_PAUSING: Final[dict[str, EndpointSpec]] = endpoints_of(_Pausing)


class Pausing(Protocol):
    """Pauses the engines of a pool. ``Client`` documents methods of the same names.

    ``PoolPausing`` implements it for a local pool, ``remote.client`` for a remote pool.
    """

    def start(self) -> None:
        """The pool has started."""
        ...

    async def pause(self, mode: str, timeout: float | None) -> None: ...

    async def resume(self, timeout: float | None) -> None: ...

    async def abort(self, worker: int | None, timeout: float | None) -> int: ...


class PoolPausing(DriverListener):
    """Pauses the engines of this process's pool, and of each worker that starts meanwhile."""

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
            await ask_all(self._pool.driver, _PAUSING["pause"], (mode,), timeout=timeout)
        except InvalidRequest:
            # The engine does not have this mode.
            self._paused = before
            self._hold()
            raise

    async def resume(self, timeout: float | None) -> None:
        check_timeout(timeout)
        self._paused = False
        await ask_all(self._pool.driver, _PAUSING["resume"], timeout=timeout)
        self._hold()

    def _hold(self) -> None:
        reason = "generation is paused (client.pause); await client.resume()"
        self._pool.driver.hold("pause", reason if self._paused else None)

    async def abort(self, worker: int | None, timeout: float | None) -> int:
        check_timeout(timeout)
        body = encode(TokenChunk(b"", finish="abort", version=self._pool.weights.version))
        # Answer waiting calls first. Otherwise they would be sent when aborted calls free a place.
        waiting = self._pool.driver.answer_waiting("generate", body, worker)
        ended = await ask_all(self._pool.driver, _PAUSING["abort"], timeout=timeout, worker=worker)
        return waiting + sum(map(int, ended.values()))

    def before_serving(self, worker: int) -> None:
        if self._paused:
            tell(self._pool.driver, _PAUSING["pause"], ("in_place",), worker)


async def ask_all(
    driver: Driver,
    spec: EndpointSpec,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    worker: int | None = None,
) -> dict[int, Any]:
    """Call a control endpoint on all workers that serve, or on one worker, concurrently.

    Args:
        worker: call only this worker. None: all workers that serve.

    Returns:
        The answers by worker index, in worker order. With ``worker=None``, a worker that is lost
        meanwhile has no answer.
    """
    workers = driver.ready if worker is None else [worker]
    calls, futures = [], []
    for index in workers:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        calls.append(_control(spec, args, kwargs or {}, index, future, timeout))
        futures.append(future)
    found = await submit_all(driver, calls, futures, return_exceptions=worker is None)
    answers = {}
    for index, one in zip(workers, found, strict=True):
        if not isinstance(one, BaseException):
            answers[index] = one
        elif not isinstance(one, WorkerLost):
            raise one
    return answers


def tell(driver: Driver, spec: EndpointSpec, args: tuple[Any, ...], worker: int) -> None:
    """Call a control endpoint on a worker without waiting for the answer.

    A lost worker is ignored, because its replacement receives the call when it starts to serve.
    """
    future = driver.loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    with contextlib.suppress(Closed, WorkerLost):
        driver.submit(_control(spec, args, {}, worker, future, None))


def _control(
    spec: EndpointSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    worker: int,
    future: asyncio.Future[Any],
    timeout: float | None,
) -> Call:
    body, _ = spec.arguments.encode(args, kwargs)
    return urgent_call(spec, Raw(body), worker, future, timeout)


def urgent_call(
    spec: EndpointSpec,
    body: Raw,
    worker: int,
    future: asyncio.Future[Any],
    timeout: float | None,
    frames: Sequence[memoryview] = (),
) -> Call:
    """Make an urgent call to one worker. It may concern the calls that the worker holds.

    Args:
        body: the encoded arguments.
        frames: the raw frames of the call.
    """
    return Call(
        spec.name,
        body,
        UnaryReply(future, spec.result),
        frames,
        deadline_from(timeout),
        priority=_FIRST,
        pinned=worker,
        idempotent=spec.idempotent,
        urgent=True,
    )
