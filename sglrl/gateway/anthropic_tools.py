"""Convert tools of Anthropic's API to tools of OpenAI's API.

https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/tool-search-tool
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from ..errors import InvalidRequest
from .accepted_fields import ANTHROPIC_FIELDS
from .dialect import convert_fields

_SEARCH: Final = "tool_search_tool_"
"""The start of the type of a tool that searches for deferred tools on Anthropic's servers."""


class Tool(msgspec.Struct, frozen=True):
    """An item of the field ``tools``."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None
    defer_loading: bool | None = None
    input_examples: list[dict[str, Any]] | None = None

    def as_function(self) -> dict[str, Any]:
        """Return the function as in OpenAI's chat completions."""
        texts = [self.description] if self.description is not None else []
        if self.input_examples:
            examples = [json.dumps(one, ensure_ascii=False) for one in self.input_examples]
            texts.append("Examples of its input:\n" + "\n".join(examples))
        function: dict[str, Any] = {"name": self.name}
        if texts:
            function["description"] = "\n\n".join(texts)
        return {**function, "parameters": self.input_schema}


class Tools(NamedTuple):
    """The tools of a request, in the form of OpenAI's chat completions.

    Attributes:
        shown: the tools that the prompt shows at its beginning.
        deferred: the tools that the prompt shows only where a message refers to them.
        described: the deferred tools to which a message refers, and the tools that messages add.
        left_out: the positions and types of the tools that the model cannot be shown.
    """

    shown: list[dict[str, Any]]
    deferred: list[dict[str, Any]]
    described: list[dict[str, Any]]
    left_out: list[str]

    @property
    def by_name(self) -> dict[str, dict[str, Any]]:
        """The functions of the shown and the deferred tools, by name."""
        functions = [tool["function"] for tool in (*self.shown, *self.deferred)]
        return {function["name"]: function for function in functions}


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the tools of a request.

    Raises:
        InvalidRequest: a tool is wrong.
    """
    result = Tools([], [], [], [])
    # Only Anthropic's servers can run their search for deferred tools. If the request has this
    # search, the model is shown all tools instead.
    finds = not any(str(given.get("type")).startswith(_SEARCH) for given in tools)
    for number, given in enumerate(tools):
        where, type_ = f"tools[{number}]", given.get("type")
        if type_ not in (None, "custom"):
            result.left_out.append(f"{where} of type {type_!r:.99}")
            continue
        tool = tool_of(given, where)
        made = {"type": "function", "function": tool.as_function()}
        (result.deferred if tool.defer_loading and finds else result.shown).append(made)
    return result


def tool_of(given: Mapping[str, Any], where: str) -> Tool:
    """Return a checked tool.

    Args:
        given: the tool as the client sent it.
        where: the part of the request that has the tool, for error messages.

    Raises:
        InvalidRequest: the tool is wrong, or Anthropic's servers define it or run it.
    """
    if given.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{where} is of type {given['type']!r:.99}, and only tools with an 'input_schema' that "
            "the client runs are supported"
        )
    return convert_fields(given, Tool, ANTHROPIC_FIELDS, where=where, part="tools[].")


def described(functions: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that shows tools to the model in the middle of a conversation."""
    lines = [
        f"<function>{json.dumps(function, ensure_ascii=False)}</function>" for function in functions
    ]
    return "\n".join(["<functions>", *lines, "</functions>"])
