"""Anthropic's Messages API: requests and answers, without I/O.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ..errors import InvalidRequest
from ..inference.completion import Completion
from .accepted_fields import ANTHROPIC_FIELDS
from .answers import cuts_call, message_of, token_counts, unsent, weight_versions
from .anthropic_messages import Content, InputMessage, openai_messages
from .anthropic_tools import openai_tools
from .dialect import (
    Dialect,
    FlatBody,
    Message,
    NewTokens,
    Part,
    TurnRequest,
    decode_body,
    event,
    template_of,
)
from .errors import HttpError
from .sampling_body import sampling_fields

COUNT_PATH: Final = "/v1/messages/count_tokens"
"""The path of the endpoint that counts the tokens of a prompt, without "/sessions/ID"."""
_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The type of an error for each HTTP status. https://docs.anthropic.com/en/api/errors"""
_DISPLAYS: Final = (None, "summarized", "updates", "omitted")
"""Values of ``thinking.display``. With "omitted", an answer has no text of the reasoning. With all
other values, it has the whole reasoning."""
_SIGNATURE: Final = "sglrl"
"""The signature of all reasoning. Clients expect a signature and send it back. The gateway does not
check it."""
_BLOCKS: Final[dict[Part, tuple[str, str]]] = {
    "reasoning_content": ("thinking", "thinking_delta"),
    "content": ("text", "text_delta"),
}
"""For each part of a message, the type of its block and the type of the block's deltas. The field
with the text of a block has the same name as the block's type."""


class ToolChoice(msgspec.Struct, frozen=True):
    """The field ``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True):
    """The field ``thinking``."""

    type: Literal["adaptive", "between_tools", "enabled", "disabled"]
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The field ``output_config.format``."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    """The field ``output_config``."""

    format: OutputFormat | None = None
    effort: str | None = None


@sampling_fields("anthropic")
class MessagesRequest(FlatBody, frozen=True, kw_only=True):
    """The body of a request of Anthropic's Messages API."""

    messages: list[InputMessage]
    model: str = ""
    system: Content | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    mcp_servers: list[dict[str, Any]] | None = None

    def turns(self) -> list[TurnRequest]:
        choice = self.tool_choice or ToolChoice()
        tools = openai_tools(self.tools or ())
        if self.mcp_servers:
            tools.left_out.append("mcp_servers")
        if self.thinking is not None:
            _check_thinking(self.thinking)
        made = TurnRequest(
            messages=openai_messages(self.messages, self.system, tools),
            stream=bool(self.stream),
            sampling={
                **self.given_sampling(),
                **_grammar(self.output_config),
            },
            tool_choice=_choice_of(choice),
            parallel_tool_calls=not (tools.shown and choice.disable_parallel_tool_use),
            tools=tools.shown if tools.shown and choice.type != "none" else None,
            later_tools=tools.described if choice.type != "none" else (),
            left_out=tools.left_out,
            chat_template_kwargs=template_of(self._effort(), None, self.chat_template_kwargs),
            priority=self.priority or 0,
            names={**self.sampling_names(), "json_schema": "output_config.format"},
        )
        return [made]

    def answer(self, model: str, call_ids: str) -> MessagesAnswer:
        return MessagesAnswer(f"msg_{secrets.token_hex(12)}", model, self, call_ids)

    def _effort(self) -> str | None:
        """Return the effort as in OpenAI's APIs. It is "none" if thinking is disabled."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        return None if self.output_config is None else self.output_config.effort


def parse(body: bytes) -> MessagesRequest:
    """Parse the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    return decode_body(body, MessagesRequest, ANTHROPIC_FIELDS)


def _choice_of(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice.name is missing: the tool that must be called")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.name:
        raise InvalidRequest(f'tool_choice.name needs the type "tool", got {choice.type!r}')
    return "required" if choice.type == "any" else "auto"


def _check_thinking(thinking: Thinking) -> None:
    if thinking.display not in _DISPLAYS:
        known = ", ".join(map(repr, _DISPLAYS[1:]))
        raise InvalidRequest(
            f"thinking.display must be one of {known}, got {thinking.display!r:.99}"
        )


def _grammar(config: OutputConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    return {} if config.format is None else {"json_schema": config.format.schema}


# --- answers --------------------------------------------------------------------------------------


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an answer for an error."""
    kind = _ERRORS.get(error.status)
    if kind is None:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if error.code == "context_length_exceeded":
        # If a message begins with these words, agents shorten the conversation.
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def usage_of(completion: Completion) -> dict[str, int]:
    """Return the ``usage`` of an answer. Its input tokens do not include cached tokens."""
    prompt, sampled, cached = token_counts([completion])
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def texts_of(message: Message) -> dict[Part, str]:
    """Return the text of each part of a message that becomes a block.

    A part of only white space becomes no block. If no part becomes a block and there are no tool
    calls, the content becomes a block all the same, because many agents read the first block.
    """
    parts = {part: message.get(part) or "" for part in _BLOCKS}
    texts = {part: text for part, text in parts.items() if text.strip()}
    return texts if texts or message.get("tool_calls") else {"content": parts["content"]}


class MessagesAnswer:
    """Makes the answer to a request of Anthropic's Messages API. See ``Answer``.

    An object makes only one answer, because it numbers the blocks of the stream.

    Args:
        id_: the id of the answer.
        model: the name of the model.
        request: the body of the request.
        call_ids: a prefix for the ids of tool calls. "": no prefix is needed, because the ids are
            unique within the session.
    """

    def __init__(self, id_: str, model: str, request: MessagesRequest, call_ids: str = "") -> None:
        self._id = id_
        self._model = model
        self._request = request
        self._call_ids = call_ids
        self._block = -1
        """The number of the last block of the stream."""
        self._part: Part | None = None
        """The part of the message in the open block. None: no block for a part is open."""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return an object of type "message"."""
        (completion,) = completions
        message = message_of(completion, self._call_ids)
        content: list[dict[str, Any]] = []
        for part, text in texts_of(message).items():
            kind, _ = _BLOCKS[part]
            block = {"type": kind, kind: "" if self._omits(part) else text}
            content.append({**block, "signature": _SIGNATURE} if kind == "thinking" else block)
        content += [
            {**_tool_use(call), "input": msgspec.Raw(_input_of(call).encode())}
            for call in message.get("tool_calls") or ()
        ]
        end = self._end_of(completion, message)
        return self._message(content, end, usage_of(completion))

    def begin(self) -> bytes:
        # The numbers of tokens are known only at the end, in the event message_delta.
        nothing = {"stop_reason": None, "stop_sequence": None}
        message = self._message([], nothing, {"input_tokens": 0, "output_tokens": 0})
        return _event("message_start", message=message)

    def text(self, index: int, part: Part, added: str, new: NewTokens = None) -> bytes:
        kind, delta = _BLOCKS[part]
        events = b""
        if self._part != part:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = self._close() + self._open({"type": kind, kind: "", **signature})
            self._part = part
        sends = added and not self._omits(part)
        return events + (self._delta({"type": delta, kind: added}) if sends else b"")

    def _omits(self, part: Part) -> bool:
        """Return whether the client wants the text of this part to be left out."""
        thinking = self._request.thinking
        omits = thinking is not None and thinking.display == "omitted"
        return omits and part == "reasoning_content"

    def end(self, completions: Sequence[Completion], sent: Sequence[Mapping[Part, str]]) -> bytes:
        (completion,), (before,) = completions, sent
        message = message_of(completion, self._call_ids)
        events = b""
        for part in texts_of(message):
            if part == "reasoning_content" and "content" in before:
                # The block of the reasoning has ended. The rest is only white space.
                continue
            events += self.text(0, part, unsent(message, part, before))
        events += self._close()
        for call in message.get("tool_calls") or ():
            events += self._open({**_tool_use(call), "input": {}})
            events += self._delta({"type": "input_json_delta", "partial_json": _input_of(call)})
            events += _event("content_block_stop", index=self._block)
        end = self._end_of(completion, message)
        events += _event("message_delta", delta=end, usage=usage_of(completion))
        return events + _event("message_stop")

    def failed(self, error: HttpError) -> bytes:
        return event(anthropic_error(error), "error")

    def _message(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage,
        }

    def _end_of(self, completion: Completion, message: Message) -> dict[str, Any]:
        """Return the fields of an answer that are known only at its end."""
        stop, match = "end_turn", None
        if message.get("tool_calls") and not cuts_call(completion):
            stop = "tool_use"
        elif completion.finish_reason == "length":
            most = self._request.given_sampling().get("max_new_tokens")
            reached = most is not None and len(completion.output_ids) >= most
            stop = "max_tokens" if reached else "model_context_window_exceeded"
        elif completion.finish_reason == "abort":
            # Anthropic has no reason for aborts. "pause_turn" means that the answer may be
            # continued.
            stop = "pause_turn"
        elif isinstance(completion.stop_match, str):
            stop, match = "stop_sequence", completion.stop_match
        body: dict[str, Any] = {
            "stop_reason": stop,
            "stop_sequence": match,
            "weight_versions": weight_versions(completion),
        }
        if self._request.return_token_ids:
            body["token_ids"] = completion.output_ids.tolist()
            body["prompt_token_ids"] = completion.prompt_ids.tolist()
        return body

    def _open(self, block: dict[str, Any]) -> bytes:
        self._block += 1
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> bytes:
        """End the block that contains a part of the message, if one is open."""
        part, self._part = self._part, None
        if part is None:
            return b""
        signed = b""
        if part == "reasoning_content":
            signed = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        return signed + _event("content_block_stop", index=self._block)


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _input_of(call: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as standard JSON, which has no NaN and no infinity."""
    arguments = json.loads(call["function"]["arguments"], parse_constant=lambda name: None)
    return json.dumps(arguments)


def _event(name: str, **fields: Any) -> bytes:
    return event({"type": name, **fields}, name)


ANTHROPIC: Final = Dialect("/v1/messages", parse, anthropic_error, MessagesRequest)
