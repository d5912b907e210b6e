"""Show custom tools and namespaces to the model as functions, which chat templates know.

A custom tool takes a text. The model sees a function with one argument, the text. A namespace has
functions and custom tools. The model sees each of them under a name that begins with the name of
the namespace. In answers, tool calls have the form that the client expects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_INPUT: Final = "input"
_SEPARATOR: Final = "__"


class Shown(NamedTuple):
    """A tool as the client has given it.

    Attributes:
        name: the name of the tool.
        namespace: the name of the tool's namespace. "": the tool is in no namespace.
        custom: whether the tool takes a text.
    """

    name: str
    namespace: str = ""
    custom: bool = False


def shown_name(name: str, namespace: str = "") -> str:
    """Return the name under which the model sees a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def custom_function(name: str, description: str, form: Any) -> dict[str, Any]:
    """Return the function that stands for a custom tool.

    Args:
        name: the name that the model sees.
        description: the description of the tool.
        form: the format of the text. A grammar becomes part of the description, which asks the
            model to follow it.
    """
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        grammar = form.get("grammar", form)
        if isinstance(grammar, Mapping) and grammar.get("definition"):
            rule = f"The input follows this {grammar.get('syntax', '')} grammar:"
            description = f"{description}\n\n{rule}\n{grammar['definition']}".strip()
    properties = {_INPUT: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [_INPUT]}
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    return {**function, "description": description} if description else function


def input_of(arguments: str) -> str | None:
    """Return the text in the arguments of a custom tool's call.

    Args:
        arguments: the arguments as JSON.

    Returns:
        The text. None if the model has not written exactly one text.
    """
    try:
        values = json.loads(arguments)
    except ValueError:
        return None
    text = values.get(_INPUT) if isinstance(values, dict) and len(values) == 1 else None
    return text if isinstance(text, str) else None


def arguments_of(text: str) -> str:
    """Return the arguments of a custom tool's call with this text, as JSON."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)
