"""OpenAI's chat completions: requests, answers and errors, without I/O.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from ..errors import InvalidRequest
from ..inference.completion import Completion

logger = logging.getLogger("sglrl.gateway")
Message = dict[str, Any]

_IGNORED: Final = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
)  # fmt: skip
"""Fields that do not change the answer."""
_NOTHING: Final[dict[str, Any]] = {"modalities": (None, ["text"])}
"""Values of fields that are not supported which ask for nothing. Of others: false, or empty."""
_INSTEAD: Final = {
    "function_call": "tool_choice",
    "functions": "tools",
    "guided_grammar": "ebnf",
    "guided_json": "response_format",
    "guided_regex": "regex",
    "guided_choice": "regex",
}
"""Fields that are not supported, and those that take their place."""


class StreamOptions(msgspec.Struct, frozen=True):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(msgspec.Struct, frozen=True):
    """``response_format.json_schema``."""

    name: str = ""
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request. The fields after ``parallel_tool_calls`` are not OpenAI's.

    Attributes:
        top_k, min_p, ...: the fields of ``SamplingParams`` with these names.
        return_token_ids: add the tokens of the prompt and of each choice to the answer.
    """

    messages: list[Message]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def streams(self) -> bool:
        """Whether text is sent as it is sampled: of a single choice."""
        return bool(self.stream) and self.choices == 1

    @property
    def usage_at_end(self) -> bool:
        """Whether a stream ends with a chunk of the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams``.

        Raises:
            InvalidRequest: two fields exclude each other, or one has a wrong value.
        """
        limits = self.max_completion_tokens, self.max_tokens
        if None not in limits and limits[0] != limits[1]:
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one of them")
        given = {name: getattr(self, name) for name in _SAMPLING}
        found = {name: value for name, value in given.items() if value is not None}
        found["max_new_tokens"] = next((one for one in limits if one is not None), MOST_TOKENS)
        found |= _grammar(self.response_format)
        if self.min_tokens is not None:
            found["min_new_tokens"] = self.min_tokens
        return found

    def options(self) -> dict[str, Any]:
        """Return the other arguments of ``Session.generate``.

        Raises:
            InvalidRequest: one has a wrong value.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true")
        return {"top_logprobs": self.top_logprobs or 0, "tool_choice": self._tool_choice()}

    def checked(self) -> ChatRequest:
        """Check the fields that are not sampling parameters. Return the request.

        Raises:
            InvalidRequest: one has a wrong value.
        """
        if not 1 <= self.choices <= MOST_CHOICES:
            raise InvalidRequest(f"n must be in 1..{MOST_CHOICES}, got {self.choices}")
        for name in ("max_tokens", "max_completion_tokens"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {given}")
        self.sampling()
        self.options()
        return self

    def template(self) -> dict[str, Any]:
        """Return the arguments of the session that decide what its prompts look like."""
        shown = self.tools if self.tool_choice != "none" else None
        return {"tools": shown or None, "chat_template_kwargs": self.chat_template_kwargs or None}

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if (
            self.parallel_tool_calls is False
            and self.tools
            and choice in (None, "auto", "required")
        ):
            raise InvalidRequest(
                "parallel_tool_calls=false is not supported; tool_choice with the name of a tool "
                "makes a single call"
            )
        return "auto" if choice in (None, "none") else choice


MOST_CHOICES: Final = 128
MOST_TOKENS: Final = 1 << 30
"""Without ``max_tokens`` a turn may fill the context, as in OpenAI's API."""
_SAMPLING: Final = (
    "temperature", "top_p", "stop", "seed", "frequency_penalty", "presence_penalty", "logit_bias",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos",
    "skip_special_tokens", "no_stop_trim", "regex", "ebnf",
)  # fmt: skip
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def parse(body: bytes) -> ChatRequest:
    """Parse the body of a request.

    Raises:
        InvalidRequest: it is not JSON, a field has a wrong type, or a field asks for something that
            is not supported.
    """
    try:
        fields = _decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {error}") from None
    for name in fields.keys() - {*_IGNORED, *ChatRequest.__struct_fields__}:
        if fields[name] not in _NOTHING.get(name, (None, [], {}, "")) and fields[name] is not False:
            instead = f"; use {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise InvalidRequest(f"the field {name!r} is not supported{instead}")
    try:
        return msgspec.convert(fields, ChatRequest).checked()
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error).replace("`$.", "`").replace(" - at `$`", "")) from None


def _grammar(form: ResponseFormat | None) -> dict[str, Any]:
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if form.json_schema is None:
        raise InvalidRequest("response_format.json_schema is missing")
    return {"json_schema": form.json_schema.schema}


# --- answers --------------------------------------------------------------------------------------


def message_of(completion: Completion, ids: str = "") -> Message:
    """Return the message of a turn, as a client gets it.

    The stop string at the end is removed. Calls that are not valid are part of the content.

    Args:
        ids: begins the ids of calls.
    """
    message = completion.message.as_dict()
    content, stop = message["content"], completion.stop_match
    if isinstance(stop, str) and not completion._params.no_stop_trim and stop in content:
        content = content[: content.rfind(stop)]
    found: Message = {"role": "assistant", "content": content, "refusal": None}
    if message.get("reasoning_content"):
        found["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        found["content"] = content or None
        found["tool_calls"] = [
            {
                "id": ids + call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in calls
        ]
    return found


def finish_of(completion: Completion, message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else completion.finish_reason


def usage_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the ``usage`` of the choices of a request. They share a prompt."""
    prompt = completions[0].prompt_tokens
    sampled = sum(len(one.output_ids) for one in completions)
    cached = min(completions[0].cached_tokens, prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def weight_versions(completion: Completion) -> list[dict[str, int]]:
    """Return the policy versions of the tokens, in the format of SGLang and vLLM."""
    return [
        {"version": span.version, "start": span.start, "end": span.stop}
        for span in completion.versions
    ]


def _logprobs_of(completion: Completion, start: int, stop: int) -> dict[str, Any]:
    """Return the logprobs of the tokens ``start`` to ``stop``."""
    assert completion.logprobs is not None
    ids, values = completion.output_ids.tolist(), completion.logprobs.tolist()
    top = completion.top_logprobs

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = completion._decode([token], False)
        # A part of a character has no text of its own.
        known = list(text.encode()) if "\ufffd" not in text else None
        return {"token": text, "logprob": logprob, "bytes": known}

    found = []
    for at in range(start, stop):
        others = (
            [] if top is None else zip(top.ids[at].tolist(), top.logprobs[at].tolist(), strict=True)
        )
        found.append(
            {**entry(ids[at], values[at]), "top_logprobs": [entry(*one) for one in others]}
        )
    return {"content": found, "refusal": None}


class Answer(msgspec.Struct, frozen=True):
    """What all parts of the answer to one request share.

    Attributes:
        id: of the answer.
        created: seconds since 1970.
        model: name of the model.
        call_ids: begins the ids of calls. Those of a session are different anyway.
    """

    id: str
    created: int
    model: str
    request: ChatRequest
    call_ids: str = ""

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the answer, an object of type "chat.completion"."""
        choices = []
        for index, completion in enumerate(completions):
            message = message_of(completion, self.call_ids)
            choice = {
                "index": index,
                "message": message,
                "logprobs": None,
                "finish_reason": finish_of(completion, message),
                "weight_versions": weight_versions(completion),
            }
            if self.request.logprobs:
                choice["logprobs"] = _logprobs_of(completion, 0, len(completion.output_ids))
            if self.request.return_token_ids:
                choice["token_ids"] = completion.output_ids.tolist()
            choices.append(choice)
        found = {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage_of(completions),
        }
        if self.request.return_token_ids:
            found["prompt_token_ids"] = completions[0].prompt_ids.tolist()
        return found

    def begin(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a choice."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def text(self, index: int, part: str, text: str) -> dict[str, Any]:
        """Return a chunk with text of a part of the message."""
        return self._chunk(index, {part: text})

    def end(
        self, index: int, completion: Completion, sent: Mapping[Any, str]
    ) -> list[dict[str, Any]]:
        """Return the last chunks of a choice.

        Args:
            sent: the text of each part of the message that was sent before.
        """
        message = message_of(completion, self.call_ids)
        delta: dict[str, Any] = {}
        for part in ("reasoning_content", "content"):
            whole, before = message.get(part) or "", sent.get(part, "")
            if not whole.startswith(before):
                # Some parsers keep white space at the beginning, which was not sent.
                whole = whole.lstrip()
            if not whole.startswith(before):
                logger.error("a stream sent %r of %r", before, whole)
            elif len(whole) > len(before):
                delta[part] = whole[len(before) :]
        if "tool_calls" in message:
            calls = enumerate(message["tool_calls"])
            delta["tool_calls"] = [{"index": at, **call} for at, call in calls]
        extra: dict[str, Any] = {"weight_versions": weight_versions(completion)}
        if self.request.logprobs:
            extra["logprobs"] = _logprobs_of(completion, 0, len(completion.output_ids))
        if self.request.return_token_ids:
            extra["token_ids"] = completion.output_ids.tolist()
            extra["prompt_token_ids"] = completion.prompt_ids.tolist()
        found = [self._chunk(index, delta)] if delta else []
        return [*found, self._chunk(index, {}, finish_of(completion, message), extra)]

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the chunk with the usage, the last one."""
        head = self._head("chat.completion.chunk")
        return {**head, "choices": [], "usage": usage_of(completions)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, **(extra or {})}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}
