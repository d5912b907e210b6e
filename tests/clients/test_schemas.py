"""Every field of the schemas of clients is supported, harmless, or rejected for a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from anthropic.types import ToolParam, message_create_params
from anthropic.types.beta import BetaToolParam
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import FunctionToolParam, response_create_params

from sglrl.errors import InvalidRequest
from sglrl.gateway.accepted_fields import (
    ANTHROPIC_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    RESPONSE_FIELDS,
    Fields,
)
from sglrl.gateway.anthropic import MessagesRequest
from sglrl.gateway.anthropic_tools import Tool
from sglrl.gateway.chat import ChatRequest
from sglrl.gateway.completions import CompletionRequest
from sglrl.gateway.dialect import convert_fields
from sglrl.gateway.responses import ResponsesRequest

REJECTED = {
    # Another way of saying what other fields say.
    *("function_call", "functions", "conversation", "prompt", "thread"),
    # Text after the sampled text, and other output than text.
    *("suffix", "audio"),
    # Work of the provider's servers beside sampling.
    *("moderation", "background", "context_management", "compaction", "container"),
}


class Function(msgspec.Struct):
    """The fields of a function that ``response_items`` reads."""

    type: str
    name: str
    description: str | None = None
    parameters: Any = None


@pytest.mark.parametrize(
    ("schema", "kind", "fields", "part"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatRequest, CHAT_FIELDS, ""),
        (
            completion_create_params.CompletionCreateParamsBase,
            CompletionRequest,
            COMPLETION_FIELDS,
            "",
        ),
        (response_create_params.ResponseCreateParamsBase, ResponsesRequest, RESPONSE_FIELDS, ""),
        (FunctionToolParam, Function, RESPONSE_FIELDS, "tools[]."),
        (message_create_params.MessageCreateParamsBase, MessagesRequest, ANTHROPIC_FIELDS, ""),
        (beta_message_create_params.MessageCreateParamsBase, MessagesRequest, ANTHROPIC_FIELDS, ""),
        (ToolParam, Tool, ANTHROPIC_FIELDS, "tools[]."),
        (BetaToolParam, Tool, ANTHROPIC_FIELDS, "tools[]."),
    ],
)
def test_every_field_of_a_library_is_decided(
    schema: Any, kind: Any, fields: Fields, part: str
) -> None:
    known = {*kind.__struct_fields__, *(name.removeprefix(part) for name in fields.harmless)}
    # Only false is harmless.
    known.add("async")
    undecided = {*schema.__annotations__} - known - REJECTED
    assert not undecided


class Inner(msgspec.Struct):
    a: int = 0


class Outer(msgspec.Struct):
    one: Inner | None = None
    several: list[Inner] | None = None


def test_nested_fields_are_accepted_or_rejected() -> None:
    fields = Fields({"one.b": ("x",), "several[].c": (1,)}, {"one.b": "a"})
    given: dict[str, Any] = {
        "one": {"a": 1, "b": "x", "d": None},
        "several": [{"c": 1}, {"a": 2, "d": False}],
    }
    made = convert_fields(given, Outer, fields)
    assert made == Outer(Inner(1), [Inner(0), Inner(2)])
    for wrong, message in (
        ({"one": {"b": "y"}}, "one: the field 'b' is not supported; use a"),
        ({"several": [{}, {"c": True}]}, "several[1]: the field 'c' is not supported"),
    ):
        with pytest.raises(InvalidRequest) as error:
            convert_fields(wrong, Outer, fields)
        assert str(error.value) == message
