"""Get the schemas of tools, which callers give as schemas or as Python functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..config import type_of
from ..errors import InvalidRequest


def checked_tools(tools: Any) -> list[Any]:
    """Return the tools as a list.

    Raises:
        InvalidRequest: ``tools`` is not a list of schemas and functions. The error states the index
            of the wrong element.
    """
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Iterable):
        raise InvalidRequest(
            f"tools must be a list of schemas or functions, got {type_of(tools)}: for one tool, "
            "use tools=[tool]"
        )
    checked = list(tools)
    for at, tool in enumerate(checked):
        if not isinstance(tool, Mapping) and not callable(tool):
            raise InvalidRequest(
                f"tools[{at}] must be a schema as in OpenAI's API, or a function, got "
                f"{type_of(tool)}: {tool!r:.99}"
            )
    return checked


def schemas(tools: Any) -> list[Any]:
    """Return the schema of each tool. Functions get a schema from their hints and docstrings.

    Raises:
        InvalidRequest: a function has no usable hints or docstring; see also ``checked_tools``.
    """
    return [_schema(tool, at) for at, tool in enumerate(checked_tools(tools))]


def _schema(tool: Any, at: int) -> Any:
    if isinstance(tool, Mapping):
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        # transformers reads hints and docstrings of any form, and may raise any exception.
        raise InvalidRequest(
            f"tools[{at}] has no schema, because a schema is made of the hints and the docstring "
            f"of a function: {str(error) or repr(error)}"
        ) from None
