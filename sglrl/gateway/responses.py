"""The requests of OpenAI's Responses API, without I/O. ``response_answers`` makes the answers.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..errors import InvalidRequest
from .accepted_fields import RESPONSE_FIELDS
from .dialect import (
    Dialect,
    FlatBody,
    Message,
    Stored,
    TurnRequest,
    decode_body,
    openai_error,
    template_of,
)
from .response_answers import ResponsesAnswer
from .response_items import check_fields, choice_of, messages_of, tools_of
from .sampling_body import sampling_fields

_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    # The following are parts of items that this gateway never returns.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
_EFFORTS: Final = (None, "none", "minimal", "low", "medium", "high", "xhigh", "max")
_VERBOSITIES: Final = (None, "low", "medium", "high")


class StreamOptions(msgspec.Struct, frozen=True):
    """The field ``stream_options``."""

    include_obfuscation: bool = False


@sampling_fields("responses")
class ResponsesRequest(FlatBody, frozen=True, kw_only=True):
    """The fields of a request of OpenAI's Responses API."""

    input: str | list[dict[str, Any]] | None = None
    model: str = ""
    include: list[str] | None = None
    instructions: str | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None


class ResponsesBody(msgspec.Struct, frozen=True):
    """The body of a request of OpenAI's Responses API. See ``Body``.

    Attributes:
        fields: the fields of the request.
        id: the id of the answer, under which the conversation is stored.
        created: the time of the request, in seconds since 1970.
    """

    fields: ResponsesRequest
    id: str
    created: int

    @property
    def model(self) -> str:
        return self.fields.model

    def turns(self) -> list[TurnRequest]:
        given = self.fields
        _check_includes(given)
        _check_reasoning(given.reasoning or {})
        messages = messages_of(given.input or [])
        if not messages and not given.previous_response_id:
            raise InvalidRequest("the field 'input' is missing or empty")
        first: list[Message] = []
        if given.instructions:
            first.append({"role": "system", "content": given.instructions})
        tools = tools_of(given.tools)
        made = TurnRequest(
            messages=[*first, *messages],
            stream=bool(given.stream),
            sampling={**given.given_sampling(), **_grammar(given.text or {})},
            tool_choice=choice_of(given.tool_choice),
            parallel_tool_calls=given.parallel_tool_calls is not False or not tools.functions,
            top_logprobs=given.top_logprobs or 0,
            tools=None if given.tool_choice == "none" else tools.functions or None,
            left_out=tools.left_out,
            chat_template_kwargs=template_of(
                (given.reasoning or {}).get("effort"),
                (given.text or {}).get("verbosity"),
                given.chat_template_kwargs,
            ),
            priority=given.priority or 0,
            stored=Stored(
                id="" if given.store is False else self.id,
                previous=given.previous_response_id or "",
                unstored=len(first),
            ),
            names={**given.sampling_names(), "json_schema": "text.format"},
        )
        return [made]

    def answer(self, model: str, call_ids: str) -> ResponsesAnswer:
        given = self.fields
        sampling = given.given_sampling()
        shown = {
            "instructions": given.instructions,
            "max_output_tokens": sampling.get("max_new_tokens"),
            "metadata": given.metadata or {},
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": given.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(given.reasoning or {})},
            "temperature": sampling.get("temperature", 1.0),
            "text": {"format": {"type": "text"}, **(given.text or {})},
            "tool_choice": given.tool_choice or "auto",
            "tools": given.tools or [],
            "top_logprobs": given.top_logprobs or 0,
            "top_p": sampling.get("top_p", 1.0),
            "truncation": "disabled",
        }
        head = {"id": self.id, "object": "response", "created_at": self.created, "model": model}
        return ResponsesAnswer(
            {**head, **shown},
            logprobs=_LOGPROBS in (given.include or ()),
            token_ids=bool(given.return_token_ids),
            call_ids=call_ids,
            shown=tools_of(given.tools).shown,
        )


def parse(body: bytes) -> ResponsesBody:
    """Parse the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    fields = decode_body(body, ResponsesRequest, RESPONSE_FIELDS)
    return ResponsesBody(fields, f"resp_{secrets.token_hex(24)}", int(time.time()))


def _check_includes(given: ResponsesRequest) -> None:
    for name in given.include or ():
        if name not in _INCLUDES:
            known = ", ".join(map(repr, _INCLUDES))
            raise InvalidRequest(f"include has {name!r:.99}, and supported are {known}")
    if given.top_logprobs and _LOGPROBS not in (given.include or ()):
        raise InvalidRequest(f"top_logprobs needs include={[_LOGPROBS]}")


def _check_reasoning(given: Mapping[str, Any]) -> None:
    check_fields(given, ("effort",), "reasoning")
    if given.get("effort") not in _EFFORTS:
        known = ", ".join(map(repr, _EFFORTS[1:]))
        raise InvalidRequest(
            f"reasoning.effort must be one of {known}, got {given['effort']!r:.99}"
        )


def _grammar(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of ``SamplingParams`` for the grammar in ``text.format``."""
    check_fields(text, ("format", "verbosity"), "text")
    if text.get("verbosity") not in _VERBOSITIES:
        known = ", ".join(map(repr, _VERBOSITIES[1:]))
        raise InvalidRequest(
            f"text.verbosity must be one of {known}, got {text['verbosity']!r:.99}"
        )
    form = text.get("format")
    if form is None:
        return {}
    if not isinstance(form, Mapping):
        raise InvalidRequest(f"text.format must be an object, got {form!r:.99}")
    check_fields(form, ("type", "name", "description", "schema", "strict"), "text.format")
    match form.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            if not isinstance(form.get("schema"), Mapping):
                raise InvalidRequest("text.format.schema is missing, or is not an object")
            return {"json_schema": form["schema"]}
    raise InvalidRequest(
        "text.format.type must be one of 'text', 'json_object', 'json_schema', got "
        f"{form.get('type')!r:.99}"
    )


RESPONSES: Final = Dialect("/v1/responses", parse, openai_error, ResponsesRequest)
