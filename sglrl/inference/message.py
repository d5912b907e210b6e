"""The parsed message of an assistant's turn: content, reasoning and tool calls."""

from __future__ import annotations

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call that the model has written.

    Attributes:
        id: the id of the call. The message with the result of the call has this id as its
            ``tool_call_id``.
        name: the name of the tool, or "" if the model wrote none.
        arguments: the parsed arguments, or None if there is an ``error``.
        raw: the text of the call as the model wrote it.
        error: the reason why the call is not valid, or "".
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str
    error: str = ""


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the assistant, parsed from the sampled tokens.

    Attributes:
        content: the text without reasoning and tool calls.
        reasoning_content: the reasoning, or None if there is none.
        tool_calls: all calls in order, including calls with an ``error``.
        raw_content: the sampled text of the content and of calls with an ``error``, or "" if no
            call has an ``error``.
    """

    content: str
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    raw_content: str = ""

    @property
    def role(self) -> str:
        return "assistant"

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a dict, for a chat template or for the next request.

        Calls with an error become a part of the content, because templates cannot write them as
        calls.
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
