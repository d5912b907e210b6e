"""Handles: the endpoints of an actor class as attributes that can be called."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from difflib import get_close_matches
from typing import Any, Protocol

from msgspec import Raw

from .. import tracing
from ..core.calls import Call
from ..core.members import LOST, Member
from ..driver.driver import ENVELOPE_BYTES, Driver
from ..errors import Closed, MessageTooLarge, UnknownEndpoint, UsageError
from ..wire.codec import Arguments, Result
from .actor import EndpointSpec, deadline_from
from .replies import StreamReply, UnaryReply


class Target:
    """The process that a handle calls. The handle never calls a replacement of this process.

    Attributes:
        worker: index of the worker.
        member: the process. None: the first call sets ``member`` to the worker's current process.
            The first call itself is not bound to the process, because it depends on no earlier
            call.
        calls: the running calls.
        ended: the reason why the handle accepts no more calls, or "".
    """

    def __init__(self, worker: int, member: Member | None = None) -> None:
        self.worker = worker
        self.member = member
        self.calls: set[Call] = set()
        self.ended = ""

    def next_call(self, driver: Driver) -> Member | None:
        """Return the process to which the next call is bound, if any.

        Raises:
            Closed: the handle accepts no more calls.
        """
        if self.ended:
            raise Closed(self.ended)
        member = self.member
        if member is None:
            now = driver.fabric.members[self.worker]
            self.member = None if now.state is LOST else now
        return member

    def end(self, driver: Driver, why: str) -> None:
        """Accept no more calls, and end the running calls with ``Closed``."""
        self.ended = why
        for call in list(self.calls):
            driver.cancel(call)
            call.reply.end(call, Closed(why), ())
        self.calls.clear()


class Endpoint(Protocol):
    """The schema and the options of a call: an ``EndpointSpec``, or an operation on a pool."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Arguments: ...
    @property
    def result(self) -> Result: ...
    @property
    def timeout(self) -> float | None: ...
    @property
    def idempotent(self) -> bool: ...
    @property
    def streaming(self) -> bool: ...


class _Caller:
    """One endpoint, whose calls may be limited to one process or to one worker."""

    __slots__ = ("_driver", "_spec", "_target", "_worker")

    def __init__(
        self,
        driver: Driver,
        spec: Endpoint,
        target: Target | None = None,
        worker: int | None = None,
    ) -> None:
        self._driver = driver
        self._spec = spec
        self._target = target
        self._worker = worker if target is None else target.worker

    def __repr__(self) -> str:
        at = "" if self._worker is None else f" of worker {self._worker}"
        return f"<{type(self).__name__} of endpoint {self._spec.name}{at}>"

    def _call(
        self, reply: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None
    ) -> Call:
        spec = self._spec
        body, frames = spec.arguments.encode(args, kwargs)
        limit = self._driver.max_message_bytes - ENVELOPE_BYTES
        largest = max(len(body), *map(len, frames)) if frames else len(body)
        if largest > limit:
            raise MessageTooLarge(
                f"{spec.name}(): the arguments have {largest:,} bytes; at most {limit:,} fit one "
                "message"
            )
        return Call(
            spec.name,
            Raw(body),
            reply,
            frames=frames,
            deadline=deadline_from(timeout),
            pinned=self._worker,
            idempotent=spec.idempotent,
            stream=spec.streaming,
        )

    @property
    def _attributes(self) -> dict[str, Any]:
        """The attributes of the span of a call."""
        return {"rpc.system.name": "sglrl", "rpc.method": self._spec.name}

    def _submit(self, call: Call) -> None:
        target = self._target
        if target is not None:
            call.bound_to = target.next_call(self._driver)
        self._driver.submit(call)
        if target is not None:
            target.calls.add(call)

    def _finish(self, call: Call) -> None:
        if self._target is not None:
            self._target.calls.discard(call)


class UnaryCaller(_Caller):
    """``await handle.method(...)``. The keyword ``timeout`` sets the call's timeout in seconds."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        timeout = kwargs.pop("timeout", self._spec.timeout)
        if tracing.tracer is None:
            return await self.call(args, kwargs, timeout)
        with tracing.span(f"actor.{self._spec.name}", self._attributes, kind="CLIENT") as span:
            return await self.call(args, kwargs, timeout, tracing.headers(span))

    async def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        trace: dict[str, str] | None = None,
    ) -> Any:
        """Call the endpoint. An argument in ``kwargs`` may have the name ``timeout``."""
        future = asyncio.get_running_loop().create_future()
        call = self._call(UnaryReply(future, self._spec.result), args, kwargs, timeout)
        call.trace = trace
        self._submit(call)
        try:
            return await future
        except BaseException:
            # This has no effect on a call that has ended.
            self._driver.cancel(call)
            raise
        finally:
            self._finish(call)


class StreamCaller(_Caller):
    """``async for item in handle.stream.method(...)``.

    If the loop ends early, the call is cancelled when the iterator is garbage-collected. Wrap the
    iterator in ``contextlib.aclosing`` to cancel the call at once.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        reply = StreamReply(self._spec.result)
        timeout = kwargs.pop("timeout", self._spec.timeout)
        call = self._call(reply, args, kwargs, timeout)
        return self._iterate(reply, call)

    async def _iterate(self, reply: StreamReply, call: Call) -> AsyncGenerator[Any, None]:
        reply.give_up = lambda: self._driver.cancel(call)
        span = None
        if tracing.tracer is not None:
            span = tracing.start(f"actor.{self._spec.name}", self._attributes, kind="CLIENT")
            call.trace = tracing.headers(span)
        try:
            self._submit(call)
        except BaseException as error:
            tracing.end(span, error)
            raise
        try:
            while True:
                more, item = await reply.next()
                if not more:
                    return
                yield item
        finally:
            if not reply.done:
                self._driver.cancel(call)
            self._finish(call)
            if span is not None:
                tracing.end(span, sys.exception())


class BroadcastCaller(_Caller):
    """``await handle.broadcast.method(...)``, which calls all workers that accept calls.

    The results are in the order of the workers.
    """

    async def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        workers = self._driver.ready
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        UnaryCaller(self._driver, self._spec, worker=index)(*args, **dict(kwargs))
                    )
                    for index in workers
                ]
        except BaseExceptionGroup as failures:
            # Raise only the first error, because it has cancelled the other calls.
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


class _Namespace:
    """The endpoints of an actor class as attributes."""

    def __init__(
        self,
        driver: Driver,
        specs: dict[str, EndpointSpec],
        owner: str,
        target: Target | None = None,
    ) -> None:
        self._driver = driver
        self._specs = specs
        self._owner = owner
        self._target = target

    def _spec(self, name: str) -> EndpointSpec:
        spec = self._specs.get(name)
        if spec is None:
            near = get_close_matches(name, self._specs, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownEndpoint(
                f"{self._owner} declares no endpoint {name!r}{hint} "
                f"(endpoints: {', '.join(sorted(self._specs)) or 'none'})"
            )
        return spec

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._specs})


class StreamNamespace(_Namespace):
    def __getattr__(self, name: str) -> StreamCaller:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self._spec(name)
        if not spec.streaming:
            raise UsageError(f"{self._owner}.{name} returns one result; call handle.{name}(...)")
        return StreamCaller(self._driver, spec, self._target)


class BroadcastNamespace(_Namespace):
    def __getattr__(self, name: str) -> BroadcastCaller:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self._spec(name)
        if spec.streaming:
            raise UsageError(f"{self._owner}.{name} is a stream; broadcast takes unary endpoints")
        return BroadcastCaller(self._driver, spec)


class WorkerHandle(_Namespace):
    """The endpoints of one process as attributes. ``handle[i]`` and leases return such a handle.

    When the process dies, the state of its object is gone. Running and later calls then raise
    ``WorkerLost``, even if the endpoint is idempotent. No call runs in the replacement.
    A ``handle[i]`` is bound to the process that worker i has at the first call through it.
    """

    def __getattr__(self, name: str) -> UnaryCaller:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self._spec(name)
        if spec.streaming:
            raise UsageError(
                f"{self._owner}.{name} is a stream; iterate over handle.stream.{name}(...)"
            )
        return UnaryCaller(self._driver, spec, self._target)

    @property
    def stream(self) -> StreamNamespace:
        return StreamNamespace(self._driver, self._specs, self._owner, self._target)
