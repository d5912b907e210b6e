"""Read the arguments of tool calls in which texts have no quotes.

Some chat templates write a text argument without quotes, and any other argument as JSON. So the
argument ``5`` may be a number or a text. The schema of the argument decides.
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
"""The exceptions that a wrong schema may cause."""


_CONSTANTS: Final = {"True": True, "False": False, "None": None}


class NoValue(ValueError):
    """A text is not JSON, and the schema of the argument does not allow text."""


def parameters_of(tool: Any) -> Any:
    """Return the schema of a tool's arguments. A tool without a schema has no arguments."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    return parameters or {"type": "object", "properties": {}}


def argument_schema(parameters: Any, name: str) -> Any:
    """Return the schema of one argument: its own, or ``additionalProperties``, or True."""
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

    The result is the first of these values that is valid: the decoded JSON if it is not a text, the
    text itself, the text without white space around it, and the decoded JSON if it is a text. For
    example, ``5`` is a text for ``anyOf: [string, null]``, and a number for ``anyOf: [string,
    integer]``. If none is valid, the types that the schema allows decide whether the result is the
    text or the decoded JSON.

    Args:
        text: the text that the model has written.
        schema: the schema of the argument.
        root: the schema that contains the targets of ``$ref``.
        python: whether constants are written as in Python, see ``CallStyle``.

    Raises:
        NoValue: the text is not JSON, and the schema does not allow text.
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
    """Return, for each type or enum value that a schema allows, whether it is text."""
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
    """Return the name in the schema of a tool."""
    return tool.get("function", tool).get("name") if isinstance(tool, Mapping) else None


def texts_only(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the schema of a tool with the given arguments, which are all text."""
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def with_arguments(style: CallStyle, call: Any, texts: Any, parameters: Any) -> Any:
    """Return a parsed call with its arguments read again from their texts.

    Args:
        call: the call as parsed by the package ``renderers``.
        texts: the same call, parsed with a schema in which all arguments are text.
        parameters: the schema of the tool's arguments.
    """
    if call.status not in ("ok", "invalid_json") or not isinstance(texts.arguments, Mapping):
        return call
    written = argument_texts(style, call.raw)
    arguments, status = {}, "ok"
    for name, text in texts.arguments.items():
        # The package ``renderers`` removes white space around a text, so find the original text.
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
