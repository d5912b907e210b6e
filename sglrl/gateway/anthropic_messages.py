"""Convert messages and tools of Anthropic's API to the form of OpenAI's.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal

import msgspec

from ..errors import InvalidRequest
from .dialect import Message, convert_fields

Content = str | list[dict[str, Any]]
"""Text, or blocks."""

_CACHE: Final = ("cache_control",)
"""Fields that are ignored: prefixes are always cached."""
_NOTHING: Final[dict[str, Any]] = {"caller": (None, {"type": "direct"})}
"""Values of fields of blocks that ask for nothing."""
_ACCOUNTING: Final = "x-anthropic-billing-header:"
"""Begins a line that some clients put before the system prompt, for the accounting of Anthropic's
servers. It changes with every request, so each turn would begin another conversation.
https://github.com/sgl-project/sglang/pull/21064"""


class InputMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: Content


class TextBlock(msgspec.Struct, frozen=True):
    """Text."""

    type: str
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True):
    """Reasoning. Nothing is signed, so the signature is not checked."""

    type: str
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True):
    """A call of a tool."""

    type: str
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True):
    """The result of a call."""

    type: str
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """An item of ``tools``."""

    name: str
    input_schema: dict[str, Any]
    type: str | None = None
    description: str | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
_KINDS: Final[dict[str, type[Block]]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}
_ALLOWED: Final = {
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
    "tool": ("text",),
    "user": ("text", "tool_result"),
}
"""The types of blocks that a message may have, by its role. A result is one of the role "tool"."""


def openai_messages(messages: Sequence[InputMessage], system: Content | None) -> list[Message]:
    """Return a conversation as messages of OpenAI's chat completions.

    Adjacent messages of the same role are one, and so are adjacent blocks of text. Their texts are
    joined without a separator, as in ``check_conversation``.

    Raises:
        InvalidRequest: there are no messages, or a block is wrong or of a type that is not
            supported. Or the conversation ends with an answer, which Anthropic's API continues.
    """
    if not messages:
        raise InvalidRequest("messages is empty")
    found: list[Message] = []
    if text := _system(system or ""):
        found.append({"role": "system", "content": text})
    turns: list[tuple[str, list[Block]]] = []
    for number, message in enumerate(messages):
        blocks = _blocks(message.content, message.role, f"messages[{number}].content")
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    for role, blocks in turns:
        found += [_answer(blocks)] if role == "assistant" else _inputs(role, blocks)
    if messages[-1].role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's, and its continuation (prefill) is not supported; "
            "end with a message of the user"
        )
    return found


def openai_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as those of OpenAI's chat completions.

    Raises:
        InvalidRequest: a tool is wrong, or Anthropic's servers define it or run it.
    """
    found = []
    for number, given in enumerate(tools):
        where, type_ = f"tools[{number}]", given.get("type")
        if type_ not in (None, "custom"):
            raise InvalidRequest(
                f"{where} is of type {type_!r}, and only tools with an 'input_schema' that the "
                "client runs are supported"
            )
        tool = convert_fields(
            given,
            Tool,
            where=where,
            ignored=(*_CACHE, "eager_input_streaming"),
            nothing={"allowed_callers": (None, [], ["direct"])},
            instead={"strict": "tool_choice, whose grammar follows the schemas"},
        )
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        found.append({"type": "function", "function": function})
    return found


def _blocks(content: Content, role: str, where: str) -> list[Block]:
    """Return the checked blocks of a message."""
    if isinstance(content, str):
        return [TextBlock("text", content)]
    if not content and role != "assistant":
        raise InvalidRequest(f"{where} is empty")
    allowed = _ALLOWED[role]
    return [_block(given, allowed, f"{where}[{at}]") for at, given in enumerate(content)]


def _block(given: Mapping[str, Any], allowed: Sequence[str], where: str) -> Block:
    type_ = given.get("type")
    if not isinstance(type_, str) or type_ not in allowed:
        raise InvalidRequest(
            f"{where} is of type {type_!r}, and only these are supported here: {', '.join(allowed)}"
        )
    return convert_fields(given, _KINDS[type_], where=where, ignored=_CACHE, nothing=_NOTHING)


def _system(content: Content) -> str:
    """Return the text of a system prompt, without the line for accounting."""
    blocks = _blocks(content, "system", "system") if content else []
    first, rest = _joined(blocks[:1]), _joined(blocks[1:])
    if first.startswith(_ACCOUNTING):
        first = first.partition("\n")[2]
    return first + rest


def _joined(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _answer(blocks: Sequence[Block]) -> Message:
    """Return the message of the assistant."""
    found: Message = {"role": "assistant", "content": _joined(blocks)}
    if thoughts := "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock)):
        found["reasoning_content"] = thoughts
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input}}
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    if calls:
        found["tool_calls"] = calls
    return found


def _inputs(role: str, blocks: Sequence[Block]) -> list[Message]:
    """Return the messages before an answer: results of tools, and text, in the given order."""
    found: list[Message] = []
    for is_text, several in groupby(blocks, lambda block: isinstance(block, TextBlock)):
        if is_text:
            found.append({"role": role, "content": _joined(list(several))})
        else:
            found += [_result(block) for block in several if isinstance(block, ToolResultBlock)]
    return found


def _result(block: ToolResultBlock) -> Message:
    where = f"the result of {block.tool_use_id!r}"
    text = _joined(_blocks(block.content, "tool", where)) if block.content else ""
    if block.is_error:
        # As in Session.run_tools.
        text = f"error: {text}"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
