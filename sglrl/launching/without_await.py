"""Give synchronous callers the methods of an async class, without ``await``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

_C = TypeVar("_C", bound=type)


def without_await(source: type) -> Callable[[_C], _C]:
    """Give the decorated class the public methods and properties of ``source``.

    The decorated class keeps its own methods. Its objects must have an attribute ``source``, which
    is an object of the async class, and a method ``wait`` that runs a coroutine to its end.
    """

    def add(cls: _C) -> _C:
        for name, member in inspect.getmembers_static(source):
            if not name.startswith("_") and name not in vars(cls):
                if isinstance(member, property):
                    setattr(cls, name, _property(name, member))
                elif inspect.isfunction(member):
                    setattr(cls, name, _method(name, member))
        return cls

    return add


def _property(name: str, member: property) -> property:
    return property(lambda self: getattr(self.source, name), doc=member.__doc__)


def _method(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    waits = inspect.iscoroutinefunction(member)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = getattr(self.source, name)(*args, **kwargs)
        return self.wait(made) if waits else made

    functools.update_wrapper(call, member)
    return call
