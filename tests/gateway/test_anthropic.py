"""Requests of Anthropic's Messages API, without a server."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import InvalidRequest
from sglrl.gateway.anthropic import MessagesRequest, parse
from sglrl.gateway.dialect import TurnRequest

ASK: dict[str, Any] = {"role": "user", "content": "Hi"}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add.", "input_schema": NUMBERS}
CALL = {"type": "tool_use", "id": "call_0_0", "name": "add", "input": {"a": 1}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def parsed(**fields: Any) -> TurnRequest:
    (made,) = parse(json.dumps({"messages": [ASK], **fields}).encode()).turns()
    return made


def converted(*messages: dict[str, Any], **fields: Any) -> Any:
    return parsed(messages=[*messages, ASK], **fields).messages[:-1]


def test_names_of_anthropic_become_ours() -> None:
    request = parsed(
        max_tokens=7, stop_sequences=["x"], top_k=5, temperature=0.5, top_p=0.9, seed=3, min_p=0.1,
        min_tokens=2, metadata={"user_id": "me"}, service_tier="auto", stream=True, priority=2,
        output_config={"format": {"type": "json_schema", "schema": NUMBERS}},
        thinking={"type": "adaptive", "display": "summarized"}, stop=None, **CACHED,
    )  # fmt: skip
    assert request.sampling == {
        "max_new_tokens": 7,
        "stop": ["x"],
        "top_k": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "min_p": 0.1,
        "min_new_tokens": 2,
        "json_schema": NUMBERS,
    }
    assert (request.stream, request.choices, request.priority) == (True, 1, 2)
    assert parsed().sampling == {}
    assert parsed(stop=["y"]).sampling == {"stop": ["y"]}


def test_thinking_and_effort_are_for_the_template() -> None:
    assert parsed(thinking={"type": "adaptive"}).chat_template_kwargs is None
    off = parsed(thinking={"type": "disabled"}).chat_template_kwargs
    assert off == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    low = parsed(output_config={"effort": "low"}, chat_template_kwargs={"thinking": False})
    assert low.chat_template_kwargs == {
        "reasoning_effort": "low",
        "enable_thinking": True,
        "thinking": False,
    }


def test_tools() -> None:
    function = {"name": "add", "description": "Add.", "parameters": NUMBERS}
    ours = [{"type": "function", "function": function}]
    tool = {**ADD, **CACHED, "type": "custom", "strict": False, "allowed_callers": ["direct"]}
    assert parsed(tools=[tool]).tools == ours
    assert parsed(tools=[tool]).tool_choice == "auto"
    del tool["description"]
    assert "description" not in parsed(tools=[tool]).tools[0]["function"]
    for choice, expected in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        (
            {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            {"type": "function", "function": {"name": "add"}},
        ),
    ):
        request = parsed(tools=[ADD], tool_choice=choice)
        assert (request.tools, request.tool_choice) == (ours, expected)
    hidden = parsed(tools=[ADD], tool_choice={"type": "none"})
    assert (hidden.tools, hidden.tool_choice) == (None, "auto")
    parsed(tool_choice={"type": "auto", "disable_parallel_tool_use": True})


SYSTEM = {"role": "system", "content": "Be brief."}
ACCOUNT = "x-anthropic-billing-header: cc_version=2.1; cch="


@pytest.mark.parametrize(
    "system",
    [
        "Be brief.",
        [{"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", **CACHED}],
        f"{ACCOUNT}1;\nBe brief.",
        [{"type": "text", "text": f"{ACCOUNT}2;"}, {"type": "text", "text": "Be brief."}],
    ],
)
def test_a_system_prompt(system: Any) -> None:
    assert converted(system=system) == [SYSTEM]
    assert converted(SYSTEM) == [SYSTEM]


def test_no_system_prompt() -> None:
    for system in (None, "", []):
        assert converted(system=system) == []


def test_an_answer() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "I ", "citations": None},
        {"type": "text", "text": "add.", **CACHED},
        {**CALL, "caller": {"type": "direct"}, "toolset_name": None},
    ]
    expected = {
        "role": "assistant",
        "content": "I add.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "call_0_0",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 1}},
            }
        ],
    }
    assert converted({"role": "assistant", "content": blocks}) == [expected]
    # Adjacent messages of one role are one.
    split = [{"role": "assistant", "content": [block]} for block in blocks]
    assert converted(*split) == [expected]
    for content in ("", [], [{"type": "text", "text": ""}]):
        empty = {"role": "assistant", "content": content}
        assert converted(empty) == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("result", "content"),
    [
        ({}, ""),
        ({"content": None, "is_error": False}, ""),
        ({"content": []}, ""),
        ({"content": "3", **CACHED}, "3"),
        ({"content": [{"type": "text", "text": "3"}, {"type": "text", "text": "4"}]}, "34"),
        ({"content": "x", "is_error": True}, "error: x"),
    ],
)
def test_a_result(result: dict[str, Any], content: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "call_0_0", **result}
    ours = {"role": "tool", "tool_call_id": "call_0_0", "content": content}
    asks = [{"type": "text", "text": "And "}, {"type": "text", "text": "now?", **CACHED}]
    said = {"role": "assistant", "content": "!"}
    message = {"role": "user", "content": [block, block, *asks]}
    expected = [ours, ours, {"role": "user", "content": "And now?"}, said]
    assert converted(message, said) == expected


def blocks_of(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}, ASK]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
RESULT = {"type": "tool_result", "tool_use_id": "call_0_0"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "Expected `array`"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "Invalid enum value 'tool'"),
        ({"messages": [{**ASK, "name": "me"}]}, "unknown field `name`"),
        ({"messages": [ASK, {"role": "assistant", "content": "So"}]}, "(prefill) is not supported"),
        (blocks_of("user"), "messages[0].content is empty"),
        (
            blocks_of("user", {"type": "text", "text": "x"}, IMAGE),
            "messages[0].content[1] is of type 'image', and only these are supported here: text, "
            "tool_result",
        ),
        (blocks_of("user", {"type": "document"}), "is of type 'document'"),
        (blocks_of("user", {"type": ["text"]}), "is of type ['text']"),
        (blocks_of("user", {"type": "text"}), "messages[0].content[0]: Object missing required"),
        (blocks_of("user", {"type": "text", "text": 3}), "Expected `str`, got `int` - at `text`"),
        (blocks_of("user", {"type": "text", "text": "", "citations": [{}]}), "'citations' is not"),
        (blocks_of("user", {**RESULT, "content": [IMAGE]}), "'call_0_0'[0] is of type 'image'"),
        (blocks_of("user", CALL), "is of type 'tool_use'"),
        (blocks_of("assistant", RESULT), "is of type 'tool_result'"),
        (blocks_of("assistant", {"type": "redacted_thinking"}), "is of type 'redacted_thinking'"),
        (blocks_of("assistant", {"type": "server_tool_use"}), "is of type 'server_tool_use'"),
        (blocks_of("assistant", {**CALL, "input": "{}"}), "Expected `object`, got `str`"),
        ({"system": [IMAGE]}, "system[0] is of type 'image'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": "7"}, "Expected `int | null`, got `str` - at `max_tokens`"),
        ({"stop": "x", "stop_sequences": ["y"]}, "give one of them"),
        ({"n": 2}, "the field 'n' is not supported"),
        ({"speed": "fast"}, "the field 'speed' is not supported"),
        ({"output_format": {"type": "x"}}, "not supported; use output_config.format"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "'context_management' is not"),
        ({"container": "x"}, "the field 'container' is not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "budget_tokens is not"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "display 'omitted' is not"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "w"}]},
            "'web_search_20250305'",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "of type 'bash_20250124'"),
        ({"tools": [{"name": "add"}]}, "tools[0]: Object missing required field `input_schema`"),
        (
            {"tools": [ADD, {**ADD, "strict": True}]},
            "tools[1]: the field 'strict' is not",
        ),
        ({"tools": [{**ADD, "defer_loading": True}]}, "the field 'defer_loading' is not"),
        ({"tool_choice": {"type": "required"}}, "Invalid enum value 'required'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any", "name": "add"}}, 'needs the type "tool"'),
        (
            {"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "disable_parallel_tool_use=true is not supported",
        ),
    ],
)
def test_a_field_is_honoured_or_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parsed(**fields)
    assert message in str(error.value)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    parsed(container=None, mcp_servers=[], context_management=keeps, speed="standard", tools=[])
    names = {*MessagesRequest.__struct_fields__} - {"messages", "model"}
    assert parsed(**dict.fromkeys(names)) == parsed()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"]) | JSON},
    optional={
        "text": st.text() | JSON,
        "thinking": JSON,
        "id": JSON,
        "name": JSON,
        "input": st.dictionaries(st.text(), JSON) | JSON,
        "tool_use_id": st.text(),
        "content": JSON,
    },
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool"])
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": st.text() | st.lists(BLOCK) | JSON})


@given(
    st.dictionaries(st.sampled_from([*MessagesRequest.__struct_fields__, "other"]), JSON),
    st.lists(MESSAGE),
)
def test_any_fields_are_parsed_or_rejected(fields: dict[str, Any], messages: list[Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        parsed(**{"messages": messages, **fields})
