"""Convert messages of Anthropic's API to messages of OpenAI's API.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal

import msgspec

from ..errors import InvalidRequest
from .accepted_fields import ANTHROPIC_FIELDS
from .anthropic_tools import Tools, described, tool_of
from .dialect import Message, convert_fields

Content = str | list[dict[str, Any]]
"""The content of a message: text, or a list of blocks."""

_ACCOUNTING: Final = "x-anthropic-billing-header:"
"""The start of a line that some clients put before the system prompt, for the accounting of
Anthropic's servers. The line changes with every request, and would thus begin a new conversation
each time, so it is removed. https://github.com/sgl-project/sglang/pull/21064"""


class InputMessage(msgspec.Struct, frozen=True):
    """An item of the field ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: Content | None = None


class TextBlock(msgspec.Struct, frozen=True):
    """A block of text."""

    type: str
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True):
    """A block of reasoning. Its signature is not checked, because the gateway signs nothing."""

    type: str
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True):
    """A block with a tool call."""

    type: str
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True):
    """A block with the result of a tool call."""

    type: str
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class ToolReferenceBlock(msgspec.Struct, frozen=True):
    """A block that names a deferred tool. The model sees the tool from this block on."""

    type: str
    tool_name: str


class ToolChangeBlock(msgspec.Struct, frozen=True):
    """A block that adds or removes a tool for the rest of the conversation."""

    type: str
    tool: dict[str, Any]


Block = (
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | ToolChangeBlock
)
_KINDS: Final[dict[str, type[Block]]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
    "tool_reference": ToolReferenceBlock,
    "tool_addition": ToolChangeBlock,
    "tool_removal": ToolChangeBlock,
}
_ALLOWED: Final = {
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text", "tool_addition", "tool_removal"),
    "tool": ("text", "tool_reference"),
    "user": ("text", "tool_result"),
}
"""For each role, the types of blocks that a message may have. The role "tool" stands for the result
of a tool call."""


def openai_messages(
    messages: Sequence[InputMessage], system: Content | None, tools: Tools
) -> list[Message]:
    """Return a conversation as messages of OpenAI's chat completions.

    Adjacent messages of the same role become one message, and adjacent blocks of text become one
    text. Texts are joined without a separator, as in ``check_conversation``. Tools that messages
    add or refer to are appended to ``tools.described``.

    Raises:
        InvalidRequest: there are no messages, a block is wrong or has an unsupported type, or the
            last message is the assistant's. Anthropic's API would continue this message.
    """
    if not messages:
        raise InvalidRequest("messages is empty")
    reader = _Reader(tools)
    result: list[Message] = []
    if text := reader.system(system or ""):
        result.append({"role": "system", "content": text})
    turns: list[tuple[str, list[Block]]] = []
    for number, message in enumerate(messages):
        blocks = reader.blocks(message.content, message.role, f"messages[{number}].content")
        if turns and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    for role, blocks in turns:
        result += [_answer(blocks)] if role == "assistant" else reader.inputs(role, blocks)
    if messages[-1].role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's, and its continuation (prefill) is not supported; "
            "end with a message of the user"
        )
    return result


class _Reader:
    """Reads the content of messages.

    Args:
        tools: the tools of the request.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._functions = tools.by_name

    def blocks(self, content: Content | None, role: str, where: str) -> list[Block]:
        """Check the blocks of a message. Blocks that show, add or remove tools become texts."""
        if content is None or isinstance(content, str):
            return [TextBlock("text", content or "")]
        if not content and role != "assistant":
            raise InvalidRequest(f"{where} is empty")
        allowed, blocks = _ALLOWED[role], list[Block]()
        checked = [_block(given, allowed, f"{where}[{at}]") for at, given in enumerate(content)]
        for refers, several in groupby(checked, lambda one: isinstance(one, ToolReferenceBlock)):
            if refers:
                names = [one.tool_name for one in several if isinstance(one, ToolReferenceBlock)]
                functions = [self._function(name, where) for name in names]
                blocks.append(TextBlock("text", self._described(functions)))
                continue
            for block in several:
                if isinstance(block, ToolChangeBlock):
                    block = TextBlock("text", self._changed(block, where))
                blocks.append(block)
        return blocks

    def _changed(self, block: ToolChangeBlock, where: str) -> str:
        """Return the text that shows the model that a tool was added or removed."""
        given = block.tool.get("definition")
        if block.tool.get("type") == "tool_definition" and isinstance(given, Mapping):
            function = tool_of(given, f"{where}.tool.definition").as_function()
            self._functions[function["name"]] = function
        else:
            function = self._function(block.tool.get("name"), where)
        if block.type == "tool_removal":
            return f"The tool {function['name']} is no longer available."
        return self._described([function])

    def _described(self, functions: list[dict[str, Any]]) -> str:
        for function in functions:
            tool = {"type": "function", "function": function}
            if tool not in (*self._tools.shown, *self._tools.described):
                self._tools.described.append(tool)
        return described(functions)

    def _function(self, name: Any, where: str) -> dict[str, Any]:
        function = self._functions.get(name) if isinstance(name, str) else None
        if function is None:
            raise InvalidRequest(f"{where} names {name!r:.99}, and 'tools' has no such tool")
        return function

    def system(self, content: Content) -> str:
        """Return the text of a system prompt, without the line that begins with _ACCOUNTING."""
        blocks = self.blocks(content, "system", "system") if content else []
        first, rest = _joined(blocks[:1]), _joined(blocks[1:])
        if first.startswith(_ACCOUNTING):
            first = first.partition("\n")[2]
        return first + rest

    def inputs(self, role: str, blocks: Sequence[Block]) -> list[Message]:
        """Return the messages of the user or the system: tool results and text, in order."""
        messages: list[Message] = []
        for is_text, several in groupby(blocks, lambda block: isinstance(block, TextBlock)):
            if is_text:
                messages.append({"role": role, "content": _joined(list(several))})
            else:
                results = [one for one in several if isinstance(one, ToolResultBlock)]
                messages += [self._result(block) for block in results]
        return messages

    def _result(self, block: ToolResultBlock) -> Message:
        where = f"the result of {block.tool_use_id!r}"
        text = _joined(self.blocks(block.content, "tool", where)) if block.content else ""
        if block.is_error:
            # ``Session.run_tools`` marks errors in the same way.
            text = f"error: {text}"
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _block(given: Mapping[str, Any], allowed: Sequence[str], where: str) -> Block:
    type_ = given.get("type")
    if not isinstance(type_, str) or type_ not in allowed:
        raise InvalidRequest(
            f"{where} is of type {type_!r}, and only these are supported here: {', '.join(allowed)}"
        )
    return convert_fields(given, _KINDS[type_], ANTHROPIC_FIELDS, where=where, part="content[].")


def _joined(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))


def _answer(blocks: Sequence[Block]) -> Message:
    """Return the blocks of an answer as one message of the assistant."""
    answer: Message = {"role": "assistant", "content": _joined(blocks)}
    if thoughts := "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock)):
        answer["reasoning_content"] = thoughts
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input}}
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    if calls:
        answer["tool_calls"] = calls
    return answer
