"""OpenAI's chat completions: requests and answers, without I/O.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar

import msgspec

from ..errors import InvalidRequest
from ..inference.completion import Completion
from .accepted_fields import CHAT_FIELDS
from .answers import cuts_call, message_of, token_text, unsent, weight_versions
from .dialect import (
    DONE,
    Dialect,
    FlatBody,
    Message,
    NewTokens,
    Part,
    TurnRequest,
    check_choices,
    decode_body,
    event,
    openai_error,
    template_of,
)
from .errors import HttpError
from .prompt_logprobs import Scored, by_token, check_whole, wanted_of
from .routed_experts import check_experts, experts_of, given_experts
from .sampling_body import sampling_fields
from .structured_outputs import grammar_names, with_structured_outputs
from .token_answers import reasoning_tokens, token_rows, usage_of_prompts
from .tool_kinds import arguments_of, custom_function, input_of


class StreamOptions(msgspec.Struct, frozen=True):
    """The field ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False

    def __post_init__(self) -> None:
        if self.continuous_usage_stats:
            raise ValueError("continuous_usage_stats is not supported; use include_usage")


class JsonSchema(msgspec.Struct, frozen=True):
    """The field ``response_format.json_schema``."""

    name: str = ""
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The field ``response_format``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


@sampling_fields("chat")
class ChatRequest(FlatBody, frozen=True, kw_only=True):
    """The body of a request of OpenAI's chat completions."""

    messages: list[Message]
    model: str = ""
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_logprobs: int | bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    lora_path: str | None = None
    web_search_options: dict[str, Any] | None = None

    def turns(self) -> list[TurnRequest]:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true")
        scored = wanted_of(self._top_of_prompt)
        if scored is not None:
            check_whole("prompt_logprobs", self.stream)
        tools = _functions_of(self.tools or ())
        sampling = {
            **self.given_sampling(),
            **grammar_of(self.response_format),
            **given_experts(self.return_routed_experts, self.routed_experts_start_len),
        }
        check_experts(self.return_routed_experts, self.n)
        made = TurnRequest(
            messages=[_known_message(message) for message in self.messages],
            choices=check_choices(self.n),
            stream=bool(self.stream),
            sampling=with_structured_outputs(sampling, self.structured_outputs),
            tool_choice=self._tool_choice(),
            parallel_tool_calls=self.parallel_tool_calls is not False or not tools,
            top_logprobs=self.top_logprobs or 0,
            prompt_logprobs=scored,
            tools=tools if tools and self.tool_choice != "none" else None,
            left_out=["web_search_options"] if self.web_search_options is not None else (),
            chat_template_kwargs=template_of(
                self.reasoning_effort, self.verbosity, self.chat_template_kwargs
            ),
            priority=self.priority or 0,
            lora=self.lora_path or "",
            names={
                **self.sampling_names(),
                "input_ids": "tokens",
                **grammar_names(self.response_format, self.structured_outputs),
            },
        )
        return [made]

    def answer(self, model: str, call_ids: str) -> ChatAnswer:
        made = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        return ChatAnswer(*made, model, self, call_ids)

    @property
    def _top_of_prompt(self) -> int | None:
        """``prompt_logprobs`` as a number, or None. prime-rl's clients send true for 1."""
        return None if self.prompt_logprobs in (None, False) else int(self.prompt_logprobs or 0)

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "custom":
            return {"type": "function", "function": choice.get("custom")}
        return "auto" if choice in (None, "none") else choice

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the custom tools, which take a text."""
        customs = [one["custom"] for one in self.tools or () if one.get("type") == "custom"]
        return frozenset(one["name"] for one in customs)


class ChatTokensRequest(ChatRequest, frozen=True, kw_only=True):
    """The body of a request with the tokens of the prompt, as verifiers and prime-rl send it.

    Attributes:
        tokens: the token ids of the prompt. The messages only decide how the answer is parsed.
    """

    tokens: list[int]

    def turns(self) -> list[TurnRequest]:
        return [msgspec.structs.replace(made, prompt=self.tokens) for made in super().turns()]


_Request = TypeVar("_Request", bound=ChatRequest)


def parse(body: bytes, kind: type[_Request]) -> _Request:
    """Parse the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    return decode_body(body, kind, CHAT_FIELDS)


def _known_message(message: Message) -> Message:
    """Convert a message's role, content and tool calls to a form that all chat templates know."""
    if message.get("role") == "developer":
        return {**message, "role": "system"}
    calls = message.get("tool_calls")
    said = message.get("role") == "assistant"
    if message.get("content") is None and not calls and ("content" in message or said):
        # Libraries send null for an answer without text.
        return {**message, "content": ""}
    if not isinstance(calls, list) or not any(map(_is_custom, calls)):
        return message
    return {**message, "tool_calls": [_function_call(call) for call in calls]}


def _is_custom(item: Any) -> bool:
    """Return whether a tool is a custom tool, or a tool call is the call of a custom tool."""
    return isinstance(item, Mapping) and item.get("type") == "custom"


def _function_call(call: Any) -> Any:
    if not _is_custom(call):
        return call
    custom = call.get("custom")
    text = custom.get("input") if isinstance(custom, Mapping) else None
    if not isinstance(text, str):
        raise InvalidRequest(f"a call's custom.input must be text, got {text!r:.99}")
    function = {"name": custom.get("name"), "arguments": arguments_of(text)}
    return {"id": call.get("id"), "type": "function", "function": function}


def _functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return all tools of a request as functions.

    Raises:
        InvalidRequest: a tool has no name.
    """
    functions: list[Any] = []
    for at, tool in enumerate(tools):
        kind = "custom" if _is_custom(tool) else "function"
        given = tool.get(kind)
        name = given.get("name") if isinstance(given, Mapping) else None
        if not isinstance(given, Mapping) or not isinstance(name, str) or not name:
            raise InvalidRequest(f"tools[{at}].{kind}.name is missing, or is not text")
        if kind == "function":
            functions.append(tool)
            continue
        text = str(given.get("description") or "")
        function = custom_function(name, text, given.get("format"))
        functions.append({"type": "function", "function": function})
    return functions


def grammar_of(form: ResponseFormat | None) -> dict[str, Any]:
    """Return the field of ``SamplingParams`` for ``response_format``.

    Raises:
        InvalidRequest: the schema is missing.
    """
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.type == "structural_tag":
        return {"structural_tag": _tag_of(form)}
    if form.json_schema is None:
        raise InvalidRequest("response_format.json_schema is missing")
    return {"json_schema": form.json_schema.schema}


def _tag_of(form: ResponseFormat) -> dict[str, Any]:
    """Return the structural tag of ``response_format``, in its newer or its older form."""
    older = (form.structures, form.triggers)
    if form.format is not None and older == (None, None):
        return {"type": form.type, "format": form.format}
    if form.format is None and None not in older:
        return {"type": form.type, "structures": form.structures, "triggers": form.triggers}
    raise InvalidRequest(
        "response_format of the type 'structural_tag' needs either format, or structures and "
        "triggers"
    )


# --- answers --------------------------------------------------------------------------------------


def _client_call(call: Mapping[str, Any], customs: frozenset[str]) -> Mapping[str, Any]:
    """Return a tool call as the client expects it. Custom tools are called with a text."""
    function = call["function"]
    text = input_of(function["arguments"]) if function["name"] in customs else None
    if text is None:
        return call
    custom = {"name": function["name"], "input": text}
    return {"id": call["id"], "type": "custom", "custom": custom}


def finish_of(completion: Completion, message: Message) -> str:
    if message.get("tool_calls") and not cuts_call(completion):
        return "tool_calls"
    return completion.finish_reason


def logprobs_of(completion: Completion, as_ids: bool = False, start: int = 0) -> dict[str, Any]:
    """Return the logprobs of a completion's tokens, in OpenAI's format.

    Args:
        completion: a completion with logprobs.
        as_ids: return token ids in place of the texts of tokens, as ``token_text`` does.
        start: the position in the output of the first token to return.
    """

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = completion.decode([token], False)
        # If the token is only a part of a character, its bytes are not known.
        known = list(text.encode()) if "\ufffd" not in text else None
        name = token_text(completion, token, as_ids)
        return {"token": name, "logprob": logprob, "bytes": known}

    content = [
        {**entry(row.id, row.logprob), "top_logprobs": [entry(*one) for one in row.others]}
        for row in token_rows(completion, start)
    ]
    return {"content": content, "refusal": None}


def _usage_of(completions: Sequence[Completion], messages: Sequence[Message]) -> dict[str, Any]:
    """Return ``usage``, with the number of reasoning tokens in OpenAI's and in SGLang's field."""
    reasoning = sum(map(reasoning_tokens, completions, messages))
    return {
        **usage_of_prompts(completions, len(completions)),
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "reasoning_tokens": reasoning,
    }


class ChatAnswer(msgspec.Struct, frozen=True):
    """Makes the answer to a request of OpenAI's chat completions. See ``Answer``.

    Attributes:
        id: the id of the answer.
        created: the time of the answer, in seconds since 1970.
        model: the name of the model.
        request: the body of the request.
        call_ids: a prefix for the ids of tool calls. "": no prefix is needed, because the ids are
            unique within the session.
        scored: a list with one item: the tokens of the prompt with their logprobs. Empty: the
            request does not want them.
        tokens_sent: for each choice, the number of tokens whose logprobs a stream has sent.
    """

    id: str
    created: int
    model: str
    request: ChatRequest
    call_ids: str = ""
    scored: Sequence[Sequence[Scored]] = ()
    tokens_sent: dict[int, int] = {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return an object of type "chat.completion"."""
        choices = []
        messages = [self._message(completion) for completion in completions]
        for index, (completion, message) in enumerate(zip(completions, messages, strict=True)):
            choice = {
                "index": index,
                "message": {"reasoning_content": None, **message},
                "logprobs": None,
                "finish_reason": finish_of(completion, message),
                "matched_stop": completion.stop_match,
                "weight_versions": weight_versions(completion),
            }
            if self.request.logprobs:
                choice["logprobs"] = self._logprobs(completion)
            if self.request.return_token_ids:
                choice["token_ids"] = completion.output_ids.tolist()
            choices.append(choice)
        body = {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": _usage_of(completions, messages),
        }
        if self.request.return_token_ids:
            body["prompt_token_ids"] = completions[0].prompt_ids.tolist()
        if self.request.return_routed_experts:
            body["sglext"] = experts_of(completions[0], self.request.routed_experts_start_len)
        if self.scored:
            decode = completions[0].decode
            body["prompt_logprobs"] = by_token(self.scored[0], lambda id_: decode([id_], False))
        return body

    def begin(self) -> bytes:
        choices = range(check_choices(self.request.n))
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}) for index in choices
        )

    def text(self, index: int, part: Part, added: str, new: NewTokens = None) -> bytes:
        extra = {}
        if self.request.logprobs and new is not None:
            tokens = new()
            extra["logprobs"] = self._logprobs(tokens)
            self.tokens_sent[index] = self.tokens_sent.get(index, 0) + len(tokens.output_ids)
        return self._chunk(index, {part: added}, extra=extra)

    def end(self, completions: Sequence[Completion], sent: Sequence[Mapping[Part, str]]) -> bytes:
        messages = [self._message(completion) for completion in completions]
        events = b"".join(map(self._end, range(len(messages)), completions, messages, sent))
        head = self._head("chat.completion.chunk")
        if self.request.return_routed_experts:
            experts = experts_of(completions[0], self.request.routed_experts_start_len)
            events += event({**head, "choices": [], "sglext": experts})
        options = self.request.stream_options
        if options is not None and options.include_usage:
            events += event({**head, "choices": [], "usage": _usage_of(completions, messages)})
        return events + DONE

    def failed(self, error: HttpError) -> bytes:
        return event(openai_error(error)) + DONE

    def _end(
        self, index: int, completion: Completion, message: Message, sent: Mapping[Part, str]
    ) -> bytes:
        """Return the last chunks of a choice."""
        parts: tuple[Part, ...] = ("reasoning_content", "content")
        delta: dict[str, Any] = {
            part: text for part in parts if (text := unsent(message, part, sent))
        }
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            delta["tool_calls"] = [{"index": at, **call} for at, call in calls]
        extra: dict[str, Any] = {
            "matched_stop": completion.stop_match,
            "weight_versions": weight_versions(completion),
        }
        if self.request.return_token_ids:
            extra["token_ids"] = completion.output_ids.tolist()
            extra["prompt_token_ids"] = completion.prompt_ids.tolist()
        logprobs = {}
        if self.request.logprobs:
            logprobs["logprobs"] = self._logprobs(completion, self.tokens_sent.get(index, 0))
        finish = finish_of(completion, message)
        if not delta:
            return self._chunk(index, {}, finish, extra | logprobs)
        return self._chunk(index, delta, extra=logprobs) + self._chunk(index, {}, finish, extra)

    def _message(self, completion: Completion) -> Message:
        message, customs = message_of(completion, self.call_ids), self.request.custom_tools
        if customs and "tool_calls" in message:
            calls = [_client_call(call, customs) for call in message["tool_calls"]]
            return {**message, "tool_calls": calls}
        return message

    def _logprobs(self, completion: Completion, start: int = 0) -> dict[str, Any]:
        return logprobs_of(completion, bool(self.request.return_tokens_as_token_ids), start)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> bytes:
        # Clients of SGLang expect that each delta has ``reasoning_content``.
        delta = {"reasoning_content": None, **delta}
        choice = {"index": index, "delta": delta, "finish_reason": finish, **(extra or {})}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})


CHAT: Final = Dialect(
    "/v1/chat/completions", partial(parse, kind=ChatRequest), openai_error, ChatRequest
)
CHAT_TOKENS: Final = Dialect(
    "/v1/chat/completions/tokens",
    partial(parse, kind=ChatTokensRequest),
    openai_error,
    ChatTokensRequest,
)
