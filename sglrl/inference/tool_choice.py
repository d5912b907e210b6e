"""The grammar of a turn that must call a tool: ``tool_choice``.

The grammar is made from an example turn with a tool call, which the renderer writes. The name in
the example is replaced by the name of each given tool, and the arguments by the grammar of the
tool's JSON schema. The result is a part of a structural tag
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html). ``turn_grammar`` adds the reasoning
before the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import InvalidRequest
from .call_arguments import parameters_of
from .call_grammar import arguments_format
from .formats import Format, either, literal, optional, sequence
from .renderer import Renderer

ToolChoice: TypeAlias = str | Mapping[str, Any]
""""auto", "required", the name of a tool, or OpenAI's
``{"type": "function", "function": {"name": ...}}``."""


def chosen_tool(choice: ToolChoice, tools: Sequence[Any] | None) -> str | None:
    """Return the name of the tool that must be called.

    The result is "" if the model may choose the tool, and None if it need not call a tool.

    Raises:
        InvalidRequest: the choice is not a ``ToolChoice``, or there is no tool of this name.
    """
    if isinstance(choice, str) and choice in ("auto", "required"):
        if choice == "required" and not tools:
            raise InvalidRequest('tool_choice="required" needs tools=[...]')
        return None if choice == "auto" else ""
    try:
        name = choice if isinstance(choice, str) else choice["function"]["name"]
    except (TypeError, KeyError):
        name = None
    known = [_name(tool) for tool in tools or ()]
    if not isinstance(name, str) or name not in known:
        names = ", ".join(map(repr, ["auto", "required", *known]))
        raise InvalidRequest(f"tool_choice must be one of {names}, got {choice!r:.200}")
    return name


def _name(tool: Any) -> Any:
    if callable(tool):
        return getattr(tool, "__name__", None)
    return _function(tool).get("name") if isinstance(tool, Mapping) else None


def _function(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = schema.get("function", schema)
    return function


def calls_format(renderer: Renderer, choice: ToolChoice) -> Format:
    """Return the format of a turn that calls tools, after its reasoning.

    A chosen tool is called once. "required" allows several calls if the model's format does.

    Raises:
        InvalidRequest: see ``chosen_tool``, or XGrammar cannot describe the calls of this model.
    """
    chosen = chosen_tool(choice, renderer.tools)
    style = renderer.call_style
    if style is None:
        raise InvalidRequest(
            f"tool_choice is not possible with the renderer {renderer.name!r}: the format of its "
            "calls has no grammar"
        )
    tokens = renderer.added_tokens
    # A special token of the call within an argument would end the call, so arguments must not
    # contain the texts of these tokens. If the call has no special tokens, exclude the texts of all
    # special tokens, because the parser of the call may search for any of them.
    markers = [token for token in tokens if token in style.call] or [*tokens]
    calls = [
        sequence(
            [
                *literal(f"{style.begin}{_name(tool)}{style.middle}", tokens),
                arguments_format(parameters_of(tool), style, markers, tokens),
                *literal(style.end, tokens),
            ]
        )
        for tool in renderer.tools or ()
        if not chosen or _name(tool) == chosen
    ]
    call = either(calls)
    elements = [*optional(literal(style.space, tokens)), call]
    if not chosen and style.separator is not None:
        again = sequence([*literal(style.separator, tokens), call])
        elements.append({"type": "star", "content": again})
    return sequence(elements)


def calls_are_marked(renderer: Renderer) -> bool:
    """Return whether calls begin with a special token, so that content cannot look like a call.

    The result is also True if the style of the calls is not known. ``calls_format`` then raises.
    """
    style = renderer.call_style
    return style is None or style.begin.startswith(tuple(renderer.added_tokens))
