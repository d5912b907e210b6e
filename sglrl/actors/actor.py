"""Actors: classes whose endpoints run in worker processes, and the handles that call them.

::

    class Judge(sglrl.Actor):
        def __init__(self, rubric: str) -> None: ...

        @sglrl.endpoint(idempotent=True)
        async def score(self, prompt: str, answer: str) -> float: ...

    async with sglrl.spawn(Judge, "be strict", replicas=8) as judges:
        reward = await judges.score("2+2=", "4")

An endpoint is an async method, or an async generator for a stream. Its annotations are its schema:
arguments are checked before they are sent.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import typing
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

from msgspec import Raw

from ..config import check_timeout
from ..core.calls import Call
from ..driver.driver import ENVELOPE_BYTES, Driver, now
from ..errors import (
    DRIVER_ERRORS,
    DeadlineExceeded,
    MessageTooLarge,
    Overloaded,
    ProtocolError,
    SglrlError,
    UnknownEndpoint,
    UsageError,
    from_wire,
)
from ..wire.calls import ErrorBody, Item, ItemKind
from ..wire.codec import Arguments, Buffer, Result

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__sglrl_endpoint__"


class Actor:
    """Base class of all classes that run in a worker.

    ``__init__`` runs in the worker, with arguments typed by its annotations. Override ``open`` to
    await something before the first call, and ``close`` to release resources. Both run in the same
    task. ``close`` runs when the worker is asked to shut down, but not when the worker is killed.
    (An endpoint may have the name ``open``; then nothing is awaited before the first call.)
    """

    async def open(self) -> None:
        """Prepare for calls. Runs once, before the first call. If it raises, the start fails."""

    async def close(self) -> None:
        """Release resources. Runs once, before the worker process exits in good order."""


@overload
def endpoint(function: _F, /) -> _F: ...
@overload
def endpoint(*, idempotent: bool = False, timeout: float | None = None) -> Callable[[_F], _F]: ...


def endpoint(
    function: Any = None, /, *, idempotent: bool = False, timeout: float | None = None
) -> Any:
    """Declare a method callable from other processes.

    The method must not have a parameter ``timeout``: this keyword sets the timeout of a call.

    Args:
        idempotent: running the method twice is harmless. A call that lost its worker is then
            repeated on another worker instead of failing with ``WorkerLost``.
        timeout: seconds that a call may take from submission, unless the caller passes a
            ``timeout``.

    Raises:
        UsageError: the function is neither ``async def`` nor an async generator.
    """

    def mark(function: Any) -> Any:
        if not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            raise UsageError(
                f"endpoint {function.__qualname__} must be 'async def' (or an async generator)"
            )
        if timeout is not None:
            deadline_from(timeout)
        setattr(function, _MARK, (idempotent, timeout))
        return function

    return mark if function is None else mark(function)


class EndpointSpec:
    """One endpoint of one actor class: its schema and policy."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.streaming = inspect.isasyncgenfunction(function)
        self.idempotent, self.timeout = getattr(function, _MARK)
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]
        if "timeout" in signature.parameters:
            raise UsageError(
                f"{name}() has a parameter 'timeout', which is the caller's: handle.{name}(..., "
                "timeout=seconds) limits the call; choose another name"
            )
        hints = _hints(function)
        self.arguments = Arguments(name, signature.replace(parameters=parameters), hints)
        returns = hints.get("return", Any)
        if self.streaming:
            args = typing.get_args(returns)
            returns = args[0] if args else Any
        self.result = Result(returns)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise UsageError(
            f"the annotations of {getattr(function, '__qualname__', function)} cannot be "
            f"resolved: {error}; define the types at module level"
        ) from None


_endpoints: WeakKeyDictionary[type[Actor], dict[str, EndpointSpec]] = WeakKeyDictionary()


def endpoints_of(cls: type[Actor]) -> dict[str, EndpointSpec]:
    """Return the declared endpoints of a class by name. An override must be declared again."""
    cached = _endpoints.get(cls)
    if cached is not None:
        return cached
    found: dict[str, EndpointSpec] = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if hasattr(function, _MARK):
            if name.startswith("_") or name in _RESERVED:
                raise UsageError(f"{cls.__name__}.{name}: the name is reserved, choose another")
            found[name] = EndpointSpec(name, function)
    _endpoints[cls] = found
    return found


def constructor_arguments(cls: type[Actor]) -> Arguments:
    """Return the schema of the arguments of the class's ``__init__``."""
    if cls.__init__ is object.__init__:
        return Arguments(cls.__name__, inspect.Signature(), {})
    signature = inspect.signature(cls.__init__)
    parameters = list(signature.parameters.values())[1:]
    return Arguments(cls.__name__, signature.replace(parameters=parameters), _hints(cls.__init__))


def deadline_from(timeout: float | None) -> float | None:
    """Return the time on the driver's clock at which a timeout in seconds expires.

    Raises:
        UsageError: the timeout is not a number, or is less than zero.
        DeadlineExceeded: the timeout is zero, so there is no time to send the call.
    """
    check_timeout(timeout)
    if timeout is None or timeout == math.inf:
        return None
    if timeout == 0:
        raise DeadlineExceeded(
            f"the deadline had passed before the call was sent (timeout={timeout}); give it more "
            "than 0 seconds, or None for no limit"
        )
    # Do not add in the precision of a numpy number: the value of the clock may be large.
    return now() + float(timeout)


class UnaryReply:
    """The reply of a unary call: sets a future to the result."""

    __slots__ = ("future", "result")

    def __init__(self, future: asyncio.Future[Any], result: Result) -> None:
        self.future = future
        self.result = result

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """Ignore the chunk: a unary endpoint sends no chunks."""

    def restart(self, call: Call) -> None:
        """Do nothing: no part of the result was received."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        if self.future.done():
            return
        try:
            value = decode_outcome(self.result, outcome, frames)
        except SglrlError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


MOST_UNREAD_ITEMS = 1 << 16
MOST_UNREAD_BYTES = 256 << 20
"""Maximum unread bytes of one stream, as sent. A stream that exceeds this limit or
``MOST_UNREAD_ITEMS`` ends with ``Overloaded``: unread items would fill the driver's memory."""


class StreamReply:
    """The reply of a stream: queues its items for the single coroutine that reads them.

    Attributes:
        give_up: called once to stop the actor, if too many items are unread or an item is
            malformed.
    """

    __slots__ = ("done", "error", "give_up", "items", "result", "unread", "waiter")

    def __init__(self, result: Result) -> None:
        self.result = result
        self.items: deque[tuple[Any, int]] = deque()
        self.unread = 0
        self.give_up: Callable[[], None] = lambda: None
        self.done = False
        self.error: SglrlError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.done:
            return
        size = len(item.body) + sum(map(len, frames))
        try:
            self.items.append((self.result.decode(item.body, frames), size))
        except SglrlError as error:
            self.error = error
            self.done = True
            self.give_up()
            self._wake()
            return
        self.unread += size
        if len(self.items) > MOST_UNREAD_ITEMS or self.unread > MOST_UNREAD_BYTES:
            self.error = Overloaded(
                f"{len(self.items):,} items of this stream were not read ({self.unread:,} bytes); "
                "read it faster, or have the actor yield less"
            )
            self.done = True
            self.give_up()
        self._wake()

    def restart(self, call: Call) -> None:
        """Do nothing: a stream restarts only before its first chunk."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        if self.done:
            # The stream has ended already: an item was malformed, or too many were unread.
            return
        if isinstance(outcome, SglrlError):
            self.error = outcome
        elif outcome.kind != ItemKind.DONE:
            self.error = error_of(outcome)
        self.done = True
        self._wake()

    async def next(self) -> tuple[bool, Any]:
        """Return ``(True, item)``, or ``(False, None)`` at the end of the stream.

        Raises:
            SglrlError: the error that ended the stream.
        """
        while not self.items:
            if self.done:
                if self.error is not None:
                    raise self.error
                return False, None
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        item, size = self.items.popleft()
        self.unread -= size
        return True, item


_error_body = Result(ErrorBody)
_cancelled = "the worker gave the call up; it was cancelled there"


def error_of(item: Item) -> SglrlError:
    """Return the exception for an ERROR, FAILED or CANCELLED item."""
    if item.kind == ItemKind.CANCELLED:
        return from_wire("EngineError", _cancelled, "")
    try:
        body: ErrorBody = _error_body.decode(item.body)
    except ProtocolError as error:
        return error
    if item.kind == ItemKind.FAILED and body.kind in DRIVER_ERRORS:
        return DRIVER_ERRORS[body.kind](body.message)
    return from_wire(body.kind, body.message, body.traceback)


def decode_outcome(result: Result, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> Any:
    """Return the result of a finished call.

    Raises:
        SglrlError: the call ended with an error.
    """
    if isinstance(outcome, SglrlError):
        raise outcome
    if outcome.kind != ItemKind.DONE:
        raise error_of(outcome)
    return result.decode(outcome.body, frames)


class _Caller:
    """An endpoint bound to a handle and optionally to one worker."""

    __slots__ = ("_driver", "_spec", "_worker")

    def __init__(self, driver: Driver, spec: EndpointSpec, worker: int | None) -> None:
        self._driver = driver
        self._spec = spec
        self._worker = worker

    def __repr__(self) -> str:
        at = "" if self._worker is None else f" of worker {self._worker}"
        return f"<{type(self).__name__} of endpoint {self._spec.name}{at}>"

    def _call(
        self, reply: Any, args: tuple[Any, ...], kwargs: dict[str, Any], worker: int | None
    ) -> Call:
        spec = self._spec
        timeout = kwargs.pop("timeout", spec.timeout)
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
            pinned=worker,
            idempotent=spec.idempotent,
            stream=spec.streaming,
        )


class UnaryCaller(_Caller):
    """``await handle.method(...)``. The keyword ``timeout`` sets the call's timeout in seconds."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        call = self._call(UnaryReply(future, self._spec.result), args, kwargs, self._worker)
        self._driver.submit(call)
        try:
            return await future
        except BaseException:
            # This has no effect on a call that has ended.
            self._driver.cancel(call)
            raise


class StreamCaller(_Caller):
    """``async for item in handle.stream.method(...)``.

    Exiting the loop early stops the actor when the iterator is garbage-collected. Wrap the iterator
    in ``contextlib.aclosing`` to stop the actor at once.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        reply = StreamReply(self._spec.result)
        call = self._call(reply, args, kwargs, self._worker)
        return self._iterate(reply, call)

    async def _iterate(self, reply: StreamReply, call: Call) -> AsyncGenerator[Any, None]:
        reply.give_up = lambda: self._driver.cancel(call)
        self._driver.submit(call)
        try:
            while True:
                more, item = await reply.next()
                if not more:
                    return
                yield item
        finally:
            if not reply.done:
                self._driver.cancel(call)


class BroadcastCaller(_Caller):
    """``await handle.broadcast.method(...)``: calls all workers that accept calls.

    The results are in the order of the workers.
    """

    async def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        workers = self._driver.ready
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(
                        UnaryCaller(self._driver, self._spec, index)(*args, **dict(kwargs))
                    )
                    for index in workers
                ]
        except BaseExceptionGroup as failures:
            # Raise only the first error: the other calls were cancelled.
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]


class _Namespace:
    """The endpoints of an actor class as attributes."""

    def __init__(
        self,
        driver: Driver,
        specs: dict[str, EndpointSpec],
        owner: str,
        worker: int | None = None,
    ) -> None:
        self._driver = driver
        self._specs = specs
        self._owner = owner
        self._worker = worker

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
        return StreamCaller(self._driver, spec, self._worker)


class BroadcastNamespace(_Namespace):
    def __getattr__(self, name: str) -> BroadcastCaller:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self._spec(name)
        if spec.streaming:
            raise UsageError(f"{self._owner}.{name} is a stream; broadcast takes unary endpoints")
        return BroadcastCaller(self._driver, spec, None)


class WorkerHandle(_Namespace):
    """``handle[i]``: the endpoints of one worker as attributes."""

    def __getattr__(self, name: str) -> UnaryCaller:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = self._spec(name)
        if spec.streaming:
            raise UsageError(
                f"{self._owner}.{name} is a stream; iterate over handle.stream.{name}(...)"
            )
        return UnaryCaller(self._driver, spec, self._worker)

    @property
    def stream(self) -> StreamNamespace:
        return StreamNamespace(self._driver, self._specs, self._owner, self._worker)


_RESERVED = {
    "add_workers",
    "broadcast",
    "close",
    "remove_worker",
    "stream",
    "wait_until_full",
    "workers",
}

__all__ = [
    "Actor",
    "AsyncIterator",
    "WorkerHandle",
    "endpoint",
]
