"""What the chat template of a model makes of conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
"""Conversations with each kind of message. The right renderer makes the same tokens of them as the
chat template."""


def template_text(box: TokenizerBox, template: Mapping[str, Any]) -> str:
    """Return the source of the chat template; "" if there is none."""
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
    """Return what the chat template makes of a conversation, up to the assistant's turn.

    The arguments of calls are objects. Some templates, such as DeepSeek's, accept only their JSON.

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
