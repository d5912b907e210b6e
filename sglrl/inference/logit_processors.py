"""Check the names and parameters of logit processors, whose classes only the workers import."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from ..errors import InvalidRequest
from .tokens import check_text

REQUEST_PARAM: Final = "__req__"
"""The name under which SGLang adds the request itself to the parameters."""
_DEPTH: Final = 32
"""The maximum nesting of lists and dicts in the parameters."""
_SHAPE: Final = "a dict of JSON values (None, bool, int, float, str, lists, dicts with text keys)"


def is_processor_name(name: object) -> bool:
    """Return whether ``name`` has the form "module:Class".

    Return False for a class in ``__main__``, because workers cannot import this module.
    """
    if not isinstance(name, str):
        return False
    module, _, class_ = name.partition(":")
    parts = [*module.split("."), class_]
    return module != "__main__" and all(part.isidentifier() for part in parts)


def check_processor(name: Any, params: Any) -> None:
    """Check ``logit_processor`` and ``custom_params`` of a request.

    Raises:
        InvalidRequest: the name does not have the form "module:Class", the parameters are not JSON
            values, or there are parameters without a processor.
    """
    if name is not None and not is_processor_name(name):
        raise InvalidRequest(
            f"logit_processor must be the name of a class, as 'module:Class', got {name!r:.200}"
        )
    if params is None:
        return
    if not isinstance(params, Mapping):
        raise InvalidRequest(f"custom_params must be {_SHAPE}, got {params!r:.200}")
    if params and name is None:
        raise InvalidRequest("custom_params needs logit_processor, which reads them")
    if REQUEST_PARAM in params:
        raise InvalidRequest(f"custom_params has {REQUEST_PARAM!r}, which SGLang sets itself")
    _check_value("custom_params", dict(params), 0)


def check_declared(name: str | None, declared: Collection[str]) -> None:
    """Check that the engine has the logit processor of a request.

    Args:
        name: the name of the processor, or None or "" if the request has none.
        declared: the processors with which the engine was launched.

    Raises:
        InvalidRequest: the engine was launched without the processor.
    """
    if name and name not in declared:
        known = ", ".join(declared) or "none"
        raise InvalidRequest(
            f"the engine has no logit processor {name!r:.200}; declare it with "
            f"launch(logit_processors=[...]). Declared: {known}"
        )


def _check_value(path: str, value: Any, depth: int) -> None:
    if depth > _DEPTH:
        raise InvalidRequest(f"{path:.200} is nested more than {_DEPTH} times")
    if isinstance(value, dict):
        for key, part in value.items():
            if type(key) is not str:
                raise InvalidRequest(f"{path:.200} has the key {key!r:.200}; keys must be text")
            check_text(f"a key of {path:.200}", key)
            _check_value(f"{path}[{key!r}]", part, depth + 1)
    elif isinstance(value, (list, tuple)):
        for at, part in enumerate(value):
            _check_value(f"{path}[{at}]", part, depth + 1)
    elif type(value) is str:
        check_text(f"{path:.200}", value)
    elif not _is_number(value):
        raise InvalidRequest(f"{path:.200} is {value!r:.200}; custom_params must be {_SHAPE}")


def _is_number(value: Any) -> bool:
    """Return whether a value is None, a bool or a number that the encoding can represent."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    return value is None or type(value) in (bool, float)
