"""Read an argument that the model has written as text without quotes.

The template writes text as it is, and all other values as JSON. The schema decides what was meant.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ..errors import InvalidRequest
from .call_style import CallStyle, argument_texts
from .json_grammar import types_of
from .schema_forms import Forms
from .schema_values import valid

_ERRORS = (TypeError, ValueError, KeyError, AttributeError, re.error, RecursionError)
"""Errors of schemas that are wrong."""


_CONSTANTS: Final = {"True": True, "False": False, "None": None}


class NoValue(ValueError):
    """A text is neither JSON nor may the argument be text."""


def parameters_of(tool: Any) -> Any:
    """Return the schema of a tool's arguments. A tool without one has no arguments."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    return parameters or {"type": "object", "properties": {}}


def argument_schema(parameters: Any, name: str) -> Any:
    """Return the schema of one argument. True: it is not declared."""
    try:
        forms = Forms(parameters).alternatives(parameters, "")
        schemas = [
            form["properties"][name] if name in form.get("properties", {})
            else form.get("additionalProperties", True)
            for form in forms
        ]  # fmt: skip
        return (
            schemas[0]
            if len(schemas) == 1
            else {"anyOf": [one for one in schemas if one is not False]}
        )
    except (InvalidRequest, *_ERRORS):
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        return properties.get(name, True) if isinstance(properties, Mapping) else True


def read_argument(text: str, schema: Any, root: Any, python: bool = False) -> Any:
    """Return the value of an argument.

    A value that is valid is preferred: first JSON that is no text, then the text itself, then text
    that is written with white space around it or as JSON. ``"5"`` is therefore text for
    ``anyOf: [string, null]``, and a number for ``anyOf: [string, integer]``.

    Args:
        schema: of the argument.
        root: the schema in which ``$ref`` are searched.
        python: as in ``CallStyle``.

    Raises:
        NoValue: there is no such value.
    """
    candidates: list[Any] = [text]
    try:
        decoded = json.loads(text, parse_constant=_fail)
    except (ValueError, RecursionError):
        decoded = _CONSTANTS.get(text.strip(), text) if python else text
    if not isinstance(decoded, str):
        candidates.insert(0, decoded)
    candidates += [text.strip(), decoded] if isinstance(decoded, str) else [text.strip()]
    for value in candidates:
        try:
            if valid(schema, value, root):
                return value
        except _ERRORS:
            break
    if not isinstance(decoded, str):
        return text.strip() if _only_text(schema, root) else decoded
    if _may_be_text(schema, root):
        return text
    if decoded != text:
        return decoded
    raise NoValue(text)


def _fail(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _kinds(schema: Any, root: Any) -> list[bool]:
    """Return for each kind of value of a schema whether it is text."""
    try:
        forms = Forms(root).alternatives(schema, "")
        return [
            kind
            for form in forms
            for kind in (
                [isinstance(one, str) for one in form["enum"]]
                if "enum" in form
                else [one == "string" for one in types_of(form)]
            )
        ]
    except (InvalidRequest, *_ERRORS):
        return [True, False]


def _only_text(schema: Any, root: Any) -> bool:
    return all(_kinds(schema, root))


def _may_be_text(schema: Any, root: Any) -> bool:
    return any(_kinds(schema, root))


def tool_name(tool: Any) -> Any:
    """Return the name of a tool, which is a schema."""
    return tool.get("function", tool).get("name") if isinstance(tool, Mapping) else None


def texts_only(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the schema of a tool whose arguments are text."""
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def with_arguments(style: CallStyle, call: Any, texts: Any, parameters: Any) -> Any:
    """Return a call whose arguments are read from their texts."""
    if call.status not in ("ok", "invalid_json") or not isinstance(texts.arguments, Mapping):
        return call
    written = argument_texts(style, call.raw)
    arguments, status = {}, "ok"
    for name, text in texts.arguments.items():
        # The package removes white space at the ends.
        whole = [one for key, one in written if key.strip() == name and one.strip() == text]
        schema = argument_schema(parameters, name)
        try:
            full = whole[-1] if whole else text
            arguments[name] = read_argument(full, schema, parameters, style.python)
        except NoValue:
            arguments[name], status = text, "invalid_json"
    return replace(call, arguments=arguments, status=status)


def is_finite(value: Any) -> bool:
    """Return whether no number in a JSON value is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
