"""The grammar of a turn that must call a tool: ``tool_choice``.

The grammar is made of an example. The renderer writes a turn that thinks and calls a tool. In its
text, the reasoning is replaced by any text, the name of the tool by those of the given tools, and
the arguments by the JSON schema of each. The engine gets the result as a structural tag
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from ..errors import InvalidRequest
from .renderer import Renderer
from .sampling import Prepared, SamplingCache
from .threads import in_thread

ToolChoice: TypeAlias = str | Mapping[str, Any]
""""auto", "required", the name of a tool, or OpenAI's
``{"type": "function", "function": {"name": ...}}``."""

_Format: TypeAlias = dict[str, Any]
"""A part of a structural tag."""

_ARGUMENTS: Final = {
    "json": r'\{"a": ?1, ?"b": ?2\}',
    "qwen_xml": r"<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>",
    "glm_xml": r"<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    r"<arg_key>b</arg_key>\n<arg_value>2</arg_value>",
}
"""XGrammar's styles of arguments, and how each writes those of the example."""
_THOUGHT: Final = r"(?P<opening>.*?)Hm\.\s*(?P<closing><[^<\s]*>)"
_CALL: Final = r"(?P<space>\s*)(?P<begin>\S.*?)add(?P<middle>.*?)ARGUMENTS(?P<end>.*?)"
_SECOND_CALL: Final = r"(?P<separator>.*?)(?P=begin)add(?P=middle)ARGUMENTS(?P=end)"
"""The parts of the example: see ``Renderer.example``."""


def chosen_tool(choice: ToolChoice, tools: Sequence[Any] | None) -> str | None:
    """Return the name of the tool that must be called; "": any of them; None: none needs to be.

    Raises:
        InvalidRequest: the choice is none of those of ``ToolChoice``, or there is no such tool.
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
    found: Mapping[str, Any] = schema.get("function", schema)
    return found


async def require_call(
    samplings: SamplingCache,
    prepared: Prepared,
    choice: ToolChoice,
    renderers: Sequence[Renderer | None],
) -> Prepared:
    """Return sampling values whose grammar allows only calls of the chosen tools.

    With "auto", these are the values unchanged.

    Args:
        renderers: of the conversations, which have the same tools and the same template.

    Raises:
        InvalidRequest: another grammar is given too, no renderer fits the model, or XGrammar cannot
            describe its calls.
    """
    if choice == "auto":
        return prepared
    if prepared.params.grammars:
        raise InvalidRequest(f"tool_choice is a grammar too: omit {prepared.params.grammars[0]}")
    found = [renderer for renderer in renderers if renderer is not None]
    if not found or len(found) < len(renderers):
        raise InvalidRequest(
            "tool_choice needs a model whose format for calls of tools is known, and no renderer "
            "fits this model's chat template"
        )
    tag = await in_thread(call_grammar, found[0], choice)
    return samplings.prepare(prepared.params, {"structural_tag": tag})


def call_grammar(renderer: Renderer, choice: ToolChoice) -> dict[str, Any]:
    """Return the structural tag of a turn that calls tools.

    A chosen tool is called once. "required" allows several calls if the model's format does.

    Raises:
        InvalidRequest: as ``chosen_tool`` and ``require_call``.
    """
    chosen = chosen_tool(choice, renderer.tools)
    found = _parts(renderer)
    if found is None:
        raise InvalidRequest(
            f"tool_choice is not possible with the renderer {renderer.name!r}: XGrammar has no "
            "grammar for its calls"
        )
    style, part = found
    tokens = renderer.added_tokens
    elements: list[_Format] = []
    if "closing" in part:
        closing = tokens[part["closing"]]
        thoughts = {"type": "any_tokens", "exclude_tokens": [closing, *renderer.end_tokens]}
        elements += [*_literal(part["opening"], tokens), thoughts]
        elements.append({"type": "token", "token": closing})
    elements += _literal(part["space"], tokens)
    calls = [
        _sequence(
            [
                *_literal(f"{part['begin']}{_name(tool)}{part['middle']}", tokens),
                {
                    "type": "json_schema",
                    "style": style,
                    "json_schema": _function(tool).get("parameters") or {"type": "object"},
                },
                *_literal(part["end"], tokens),
            ]
        )
        for tool in renderer.tools or ()
        if not chosen or _name(tool) == chosen
    ]
    call: _Format = {"type": "or", "elements": calls}
    elements.append(call)
    if not chosen and "separator" in part:
        again = _sequence([*_literal(part["separator"], tokens), call])
        elements.append({"type": "star", "content": again})
    return {"type": "structural_tag", "format": _sequence(elements)}


def _sequence(elements: list[_Format]) -> _Format:
    return {"type": "sequence", "elements": elements}


def _literal(text: str, tokens: Mapping[str, int]) -> list[_Format]:
    """Return the formats of a text.

    A parser finds calls by special tokens such as ``<tool_call>``, so the grammar does not allow
    the same characters as other tokens.
    """
    longest_first = sorted(tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if tokens else [text]
    return [
        {"type": "token", "token": tokens[part]}
        if part in tokens
        else {"type": "const_string", "value": part}
        for part in parts
        if part
    ]


def _parts(renderer: Renderer) -> tuple[str, dict[str, str]] | None:
    """Return the style of arguments, and the parts of the example, with two calls if possible."""
    known = {"", *renderer.added_tokens}
    for calls in (2, 1):
        text = renderer.example(calls)
        if text is None:
            continue
        form = (_THOUGHT if "Hm." in text else "") + _CALL + (_SECOND_CALL if calls == 2 else "")
        for style, arguments in _ARGUMENTS.items():
            found = re.fullmatch(form.replace("ARGUMENTS", arguments), text, re.DOTALL)
            if found is not None and found.groupdict().get("closing", "") in known:
                return style, found.groupdict()
    return None
