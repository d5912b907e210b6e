"""Operations on a whole pool, each declared once.

An operation is an ``async`` method of ``Client`` that runs in the process that launched the pool.
There it is an ordinary method call. In any other process, ``sglrl.connect`` gives a client whose
operations send their arguments to the launching process, and return its result or raise its error.

The annotations of the method are the types of the arguments and the result in messages, as for the
endpoints of an actor. The blocking client, ``POST /pool/{operation}`` over HTTP and ``sglrl call``
take every public operation from ``operations_of``, so a new operation needs no code there.
"""

from __future__ import annotations

import functools
import inspect
import os
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Literal, TypeVar, overload

import msgspec

from ..config import check_timeout
from ..errors import UsageError
from ..wire.codec import Arguments, Result

_F = TypeVar("_F", bound=Callable[..., Awaitable[Any]])
_MARK: Final = "__sglrl_operation__"
_MARGIN: Final = 10.0
"""Seconds that the launching process has to answer after an operation's own ``timeout``."""


class Operation:
    """The schema of one operation.

    Attributes:
        function: the method as it was declared.
        name: the name of the method. It begins with an underscore if users do not call the
            operation.
        http: whether the gateway has an endpoint for the operation.
    """

    idempotent: Final = False
    streaming: Final = False
    timeout: Final = None

    def __init__(self, function: Callable[..., Awaitable[Any]], http: bool) -> None:
        self.name = function.__name__
        self.http = http
        signature = inspect.signature(function)
        self.function = function
        self.signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.limited = "timeout" in signature.parameters

    # Annotations can be resolved only after the whole module of the method was imported. The
    # properties below are therefore computed at their first use.

    @functools.cached_property
    def _hints(self) -> dict[str, Any]:
        return typing.get_type_hints(self.function)

    @functools.cached_property
    def _paths(self) -> frozenset[str]:
        """The names of the arguments that are paths. They are text in messages."""
        return frozenset(
            name
            for name, hint in self._hints.items()
            if any((typing.get_origin(one) or one) is os.PathLike for one in typing.get_args(hint))
        )

    @functools.cached_property
    def _sent_as_text(self) -> dict[str, Any]:
        """The arguments that are sent as text: paths and choices. The method checks the choices."""
        choices = [n for n, hint in self._hints.items() if typing.get_origin(hint) is Literal]
        return dict.fromkeys([*self._paths, *choices], str)

    @functools.cached_property
    def arguments(self) -> Arguments:
        return Arguments(self.name, self.signature, self._hints | self._sent_as_text)

    @functools.cached_property
    def result(self) -> Result:
        return Result(self._hints.get("return", Any))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, in a form that can be sent.

        A relative path becomes absolute, because the launching process may run in another folder.

        Raises:
            UsageError: an argument is missing or unknown, or only the launching process can use it.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{self.name}(): {error}") from None
        for name in self._paths & bound.arguments.keys():
            value = bound.arguments[name]
            if not isinstance(value, str | os.PathLike):
                raise UsageError(
                    f"{self.name}(): {name}= must be a folder, got {type(value).__name__}; only "
                    "the process that launched the pool takes anything else"
                )
            if text := os.fspath(value):
                bound.arguments[name] = os.path.abspath(os.path.expanduser(text))
        return bound.arguments

    def limit(self, arguments: Mapping[str, Any], default: float | None) -> float | None:
        """Return the seconds that a caller in another process waits for the answer. None: no limit.

        Args:
            arguments: the arguments of the call by name.
            default: the timeout of the client, for operations without a ``timeout`` argument.

        Raises:
            UsageError: the timeout is not a number of seconds.
        """
        if "drain_timeout" in self.signature.parameters:
            # The phases of an update have limits of their own.
            return None
        if not self.limited:
            return default
        default = self.signature.parameters["timeout"].default
        seconds = check_timeout(arguments.get("timeout", default))
        return None if seconds is None else seconds + _MARGIN

    @functools.cached_property
    def fields(self) -> type[msgspec.Struct]:
        """A struct with a field for each argument. It checks arguments that arrive as JSON."""
        fields: list[Any] = []
        for name, parameter in self.signature.parameters.items():
            hint = self._sent_as_text.get(name, self._hints.get(name, Any))
            if parameter.default is parameter.empty:
                fields.append((name, hint))
            else:
                fields.append((name, hint, parameter.default))
        return msgspec.defstruct(
            self.name, fields, kw_only=True, frozen=True, forbid_unknown_fields=True
        )


@overload
def operation(function: _F, /) -> _F: ...
@overload
def operation(*, urgent: bool = False, http: bool = True) -> Callable[[_F], _F]: ...


def operation(function: Any = None, /, *, urgent: bool = False, http: bool = True) -> Any:
    """Declare a method of ``Client`` that runs in the process that launched the pool.

    Args:
        function: the method, if ``operation`` is used as a decorator without arguments.
        urgent: whether the operation is allowed while the client waits for its last calls
            (``close(drain=True)``).
        http: whether the gateway has an endpoint for the operation.
    """

    def declare(function: Any) -> Any:
        spec = Operation(function, http)

        @functools.wraps(function)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._running(urgent=urgent)
            if spec.limited and kwargs.get("timeout", 0) is None:
                kwargs["timeout"] = self.timeout
            return await self._control.run(spec, self, args, kwargs)

        setattr(call, _MARK, spec)
        return call

    return declare if function is None else declare(function)


def operations_of(cls: type) -> dict[str, Operation]:
    """Return the operations of a class by name."""
    operations = {}
    for name in dir(cls):
        spec = getattr(inspect.getattr_static(cls, name), _MARK, None)
        if isinstance(spec, Operation):
            operations[name] = spec
    return operations


def public_operations(cls: type) -> dict[str, Operation]:
    """Return the operations that users call, by name."""
    return {name: spec for name, spec in operations_of(cls).items() if not name.startswith("_")}
