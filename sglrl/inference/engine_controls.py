"""What is asked of the engines beside tokens: what they report of themselves, and that they stand
still, go on, or let go of what they have."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

import msgspec
from msgspec import Raw

from ..actors.actor import Actor as _Actor
from ..actors.actor import EndpointSpec, UnaryReply, deadline_from, endpoint, endpoints_of
from ..config import check_timeout
from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..driver.driver import Driver
from ..driver.gathering import submit_all
from ..driver.pool import Pool
from ..errors import Closed, UnknownEndpoint, UsageError, WorkerLost
from ..wire.codec import encode
from ..wire.engine import EngineStats, TokenChunk

_FIRST: Final = 1 << 62
"""Priority of what a worker must be told before it gets anything else."""


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's ``EngineStats`` with its index."""

    worker: int
    engine: EngineStats


class _Engine(_Actor):
    """The unary control endpoints of an engine worker, as the workers' mailbox serves them."""

    @endpoint(idempotent=True)
    async def stats(self) -> EngineStats:
        raise NotImplementedError  # served by workers/mailbox.py

    @endpoint(idempotent=True)
    async def flush_cache(self) -> bool:
        raise NotImplementedError  # served by workers/mailbox.py


class _Pausing(_Actor):
    """More of them, which the client must know of. Not to be repeated: a replacement is told when
    it serves."""

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
"""That may be called on all engines by name."""
_PAUSING: Final[dict[str, EndpointSpec]] = endpoints_of(_Pausing)


class Controls(DriverListener):
    """Of one client, whose methods of the same names say what these do. ``timeout``: of calls that
    have none, in seconds."""

    def __init__(self, pool: Pool, timeout: float | None) -> None:
        self._pool = pool
        self._timeout = timeout
        self._paused = False

    async def stats(self) -> list[WorkerStats]:
        found = await self._ask_all(ENDPOINTS["stats"])
        return [WorkerStats(worker=w, engine=s) for w, s in found.items()]

    async def flush_cache(self) -> bool:
        return all((await self._ask_all(ENDPOINTS["flush_cache"])).values())

    async def broadcast(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> list[Any]:
        spec = ENDPOINTS.get(name)
        if spec is None:
            raise UnknownEndpoint(
                f"the engines declare no endpoint {name!r} to be called on all of them "
                f"(endpoints: {', '.join(sorted(ENDPOINTS))})"
            )
        found = await self._ask_all(spec, args, kwargs, timeout)
        return [*found.values()]

    async def pause(self, mode: str, timeout: float | None) -> None:
        if mode not in ("in_place", "retract", "abort"):
            raise UsageError(f"mode must be 'in_place', 'retract' or 'abort', got {mode!r}")
        check_timeout(timeout)
        self._paused = True
        await self._ask_all(_PAUSING["pause"], (mode,), timeout=timeout)

    async def resume(self, timeout: float | None) -> None:
        check_timeout(timeout)
        self._paused = False
        await self._ask_all(_PAUSING["resume"], timeout=timeout)

    async def abort(self, worker: int | None, timeout: float | None) -> int:
        check_timeout(timeout)
        body = encode(TokenChunk(b"", finish="abort", version=self._pool.weights.version))
        # First: they would get the places of those that end.
        waiting = self._pool.driver.answer_waiting("generate", body, worker)
        ended = await self._ask_all(_PAUSING["abort"], timeout=timeout, worker=worker)
        return waiting + sum(map(int, ended.values()))

    def before_serving(self, worker: int) -> None:
        """A worker that comes while the engines are paused is paused, too."""
        if self._paused:
            tell(self._pool.driver, _PAUSING["pause"], ("in_place",), worker)

    async def _ask_all(
        self,
        spec: EndpointSpec,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
        worker: int | None = None,
    ) -> dict[int, Any]:
        """Call a control endpoint of the engines that serve, or of this one. The answers by worker,
        in order; one that is lost meanwhile has none."""
        if timeout is None:
            timeout = self._timeout
        return await ask_all(self._pool.driver, spec, args, kwargs, timeout, worker)


async def ask_all(
    driver: Driver,
    spec: EndpointSpec,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    worker: int | None = None,
) -> dict[int, Any]:
    """Ask the workers that serve, or this one, at once. The answers by worker, in order; one that
    is lost meanwhile has none."""
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
    """Ask a worker, and do not wait for what it answers. Should it be lost first, so be it: its
    replacement is told when it comes."""
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
    """A call to one worker that goes out at once: it may be about the calls that the worker has."""
    body, _ = spec.arguments.encode(args, kwargs)
    return Call(
        spec.name,
        Raw(body),
        UnaryReply(future, spec.result),
        deadline=deadline_from(timeout),
        priority=_FIRST,
        pinned=worker,
        idempotent=spec.idempotent,
        urgent=True,
    )
