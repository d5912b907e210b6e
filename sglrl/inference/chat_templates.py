"""Render conversations with the chat template of a model, and find out which arguments it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from ..errors import InvalidRequest
from .prompts import Message
from .tokens import TokenizerBox

TOOL: Final = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
_CALL: Final = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
PROBES: Final[tuple[list[dict[str, Any]], ...]] = (
    [{"role": "user", "content": "What is 1 + 2?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}],
    [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_0", "name": "add", "content": "3"},
    ],
)
"""Conversations with each kind of message. A renderer fits a model if it encodes them to the same
tokens as the chat template."""
_OTHERS: Final = ("chat_template", "tools", "documents", "continue_final_message")
"""The arguments that ``apply_chat_template`` itself reads. They have an effect even if the template
does not name them."""
_OWN: Final = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""The tags of the ``generation`` block, with which transformers extends Jinja."""


def template_text(box: TokenizerBox, template: Mapping[str, Any]) -> str:
    """Return the source of the chat template, or "" if there is none."""
    return str(template.get("chat_template") or getattr(box.tokenizer, "chat_template", None) or "")


def template_shows_system(box: TokenizerBox) -> bool:
    """Return whether the chat template writes system messages that are not the first message."""
    first, ask = {"role": "system", "content": "Be brief."}, PROBES[0][0]
    later = {"role": "system", "content": "Be exact."}
    for messages in ([first, ask, later], [ask, later], [first, later, ask]):
        try:
            if later["content"] not in render_conversation(box, messages, {}):
                return False
        except InvalidRequest:
            return False
    return True


def render_conversation(
    box: TokenizerBox, messages: Sequence[Message], template: Mapping[str, Any]
) -> str:
    """Render a conversation with the chat template, up to the assistant's turn.

    The arguments of tool calls are passed as objects. For templates that reject objects, such as
    DeepSeek's, they are passed as JSON text.

    Raises:
        InvalidRequest: the template rejects the messages.
    """
    try:
        return box.render(messages, template)
    except InvalidRequest:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return box.render([_with_json(message) for message in messages], template)


def _with_json(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def read_arguments(template: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that can change what a chat template renders.

    Clients also send arguments that only the templates of other models use, such as
    ``enable_thinking``. If the template cannot be parsed, all arguments are returned.

    Args:
        template: the source of the template.
        arguments: the given arguments, see ``TokenizerBox.render``.
    """
    names = _variables(template)
    if names is None:
        return dict(arguments)
    return {k: v for k, v in arguments.items() if k in names or k in _OTHERS}


@lru_cache(32)
def _variables(template: str) -> frozenset[str] | None:
    """Return the names of a template's variables, or None if it cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_OWN.sub("", template))))
    except TemplateSyntaxError:
        return None
