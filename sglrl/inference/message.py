"""What an assistant's turn says: text, reasoning, and calls of tools."""

from __future__ import annotations

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, as the model wrote it.

    Attributes:
        id: names this call in the message with its result (``tool_call_id``).
        name: of the tool; "" if the model wrote none.
        arguments: the parsed arguments; None if there is an ``error``.
        raw: the text of the call.
        error: why it is no valid call, or "".
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str = ""


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the assistant, parsed from the sampled tokens.

    Attributes:
        content: the text, without reasoning and calls.
        reasoning_content: the reasoning; None if there is none.
        tool_calls: all calls in order, also those with an ``error``.
        raw_content: with a malformed call: the content and the text of malformed calls, as it was
            sampled. Otherwise "".
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    raw_content: str = ""

    @property
    def role(self) -> str:
        return "assistant"

    def as_dict(self) -> dict[str, Any]:
        """Return the message for a chat template, and for the next request.

        Calls with an error are text of the content, because templates have no place for them.
        """
        wrong = "".join(call.raw for call in self.tool_calls if call.error)
        content = self.raw_content or self.content + wrong
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.tool_calls
            if not call.error
        ]
        if calls:
            message["tool_calls"] = calls
        return message
