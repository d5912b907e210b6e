"""Actors: classes whose endpoints run in worker processes.

::

    class Judge(sglrl.Actor):
        def __init__(self, rubric: str) -> None: ...

        @sglrl.endpoint(idempotent=True)
        async def score(self, prompt: str, answer: str) -> float: ...

    async with sglrl.spawn(Judge, "be strict", replicas=8) as judges:
        reward = await judges.score("2+2=", "4")

An endpoint is an async method, or an async generator for a stream. Its annotations are its schema,
against which arguments are checked before they are sent.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

from ..config import check_timeout
from ..driver.driver import now
from ..errors import DeadlineExceeded, UsageError
from ..wire.codec import Arguments, Result, check_type

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "__sglrl_endpoint__"
_RESERVED = {
    "add_workers",
    "broadcast",
    "close",
    "lease",
    "remove_worker",
    "stream",
    "wait_until_full",
    "workers",
}
"""Names that an endpoint must not have, because they are attributes of handles."""


class Actor:
    """Base class of all classes that run in a worker.

    ``__init__`` runs in the worker, with arguments that match its annotations. Override ``open`` to
    await something before the first call, and ``close`` to release resources. ``open`` and
    ``close`` run in the same task. ``close`` does not run when the worker is killed.
    (If an endpoint has the name ``open``, it is an ordinary endpoint, and does not run at start.)
    """

    async def open(self) -> None:
        """Prepare for the first call. This runs once. If it raises, the start fails."""

    async def close(self) -> None:
        """Release resources. This runs once, before an orderly exit of the worker process."""


@overload
def endpoint(function: _F, /) -> _F: ...
@overload
def endpoint(*, idempotent: bool = False, timeout: float | None = None) -> Callable[[_F], _F]: ...


def endpoint(
    function: Any = None, /, *, idempotent: bool = False, timeout: float | None = None
) -> Any:
    """Declare that other processes may call a method.

    The method must not have a parameter ``timeout``, because callers set the timeout of a call with
    this keyword.

    Args:
        idempotent: whether it is harmless to run the method twice. If so, a call that loses its
            worker is repeated on another worker instead of failing with ``WorkerLost``.
        timeout: maximum seconds of a call from its submission, unless the caller passes
            ``timeout``. None: no limit.

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
    """One endpoint of one actor class: its schema and its options."""

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
        check_type(returns, f"the result of {name}()")
        self.result = Result(returns)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise UsageError(
            f"the annotations of {getattr(function, '__qualname__', function)} cannot be "
            f"resolved: {error}; define the types at module level"
        ) from None


_endpoints: WeakKeyDictionary[type[Any], dict[str, EndpointSpec]] = WeakKeyDictionary()


def endpoints_of(cls: type[Any]) -> dict[str, EndpointSpec]:
    """Return the declared endpoints of a class by name.

    The class is an actor, or a protocol that lists endpoints. A method that overrides an endpoint
    is an endpoint only if it is also declared with ``endpoint``.
    """
    cached = _endpoints.get(cls)
    if cached is not None:
        return cached
    endpoints: dict[str, EndpointSpec] = {}
    for name in dir(cls):
        function = inspect.getattr_static(cls, name)
        if hasattr(function, _MARK):
            if name.startswith("_") or name in _RESERVED:
                raise UsageError(f"{cls.__name__}.{name}: the name is reserved, choose another")
            endpoints[name] = EndpointSpec(name, function)
    _endpoints[cls] = endpoints
    return endpoints


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
        UsageError: the timeout is not a number, or is negative.
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
    # A numpy number may have too little precision to be added to the large value of the clock.
    return now() + float(timeout)
