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
REFERENCE = {"type": "tool_reference", "tool_name": "x"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "Expected `array`"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "Invalid enum value 'tool'"),
        ({"messages": [{**ASK, "name": "me"}]}, "messages[0]: the field 'name' is not supported"),
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
        ({"stop": ["a"], "stop_sequences": ["b"]}, "stop and stop_sequences differ: give one"),
        ({"max_tokens": "7"}, "Expected `int | null`, got `str` - at `max_tokens`"),
        ({"stop": "x", "stop_sequences": ["y"]}, "give one of them"),
        ({"n": 2}, "the field 'n' is not supported"),
        ({"speed": "fast"}, "the field 'speed' is not supported"),
        ({"output_format": {"type": "x"}}, "not supported; use output_config.format"),
        ({"context_management": {"edits": [{"type": "x"}]}}, "'context_management' is not"),
        ({"container": "x"}, "the field 'container' is not supported"),
        ({"thinking": {"type": "enabled", "budget": 1024}}, "thinking: the field 'budget' is not"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "display must be one of"),
        ({"tools": [{"name": "add"}]}, "tools[0]: Object missing required field `input_schema`"),
        ({"tools": [ADD, {**ADD, "x": True}]}, "tools[1]: the field 'x' is not"),
        (
            blocks_of("user", {**RESULT, "content": [REFERENCE]}),
            "names 'x', and 'tools' has no such tool",
        ),
        ({"tool_choice": {"type": "required"}}, "Invalid enum value 'required'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"tool_choice": {"type": "any", "name": "add"}}, 'needs the type "tool"'),
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


def test_fields_of_claude_code_are_accepted() -> None:
    """Those of Claude Code 2.1, in all places where it may send them."""
    system = {"role": "system", "content": [{"type": "text", "text": "Env", **CACHED}]}
    asks = {"role": "user", "content": [{"type": "text", "text": "Hi", **CACHED}]}
    result = {**RESULT, "content": [{"type": "text", "text": "3", **CACHED}], **CACHED}
    call = {"role": "assistant", "content": [{**CALL, **CACHED}]}
    request = parsed(
        messages=[asks, system, call, {"role": "user", "content": [result]}],
        system=[{"type": "text", "text": "Be brief.", **CACHED}],
        tools=[{**ADD, **CACHED, "strict": True, "eager_input_streaming": True}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": False, **CACHED},
        thinking={"type": "enabled", "budget_tokens": 31999, "display": "updates"},
        output_config={"effort": "high", "task_budget": {"type": "tokens", "total": 10}},
        metadata={"user_id": "x"}, betas=["x"], **CACHED,
    )  # fmt: skip
    assert [one["role"] for one in request.messages] == [
        "system", "user", "system", "assistant", "tool",
    ]  # fmt: skip
    assert [tool["function"]["name"] for tool in request.tools] == ["add"]
    assert request.parallel_tool_calls
    assert not parsed(
        tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    ).parallel_tool_calls


def test_tools_that_the_model_cannot_be_shown_are_left_out() -> None:
    request = parsed(
        tools=[{"type": "web_search_20250305", "name": "w", "max_uses": 5}, ADD],
        mcp_servers=[{"type": "url", "name": "m", "url": "https://example.org"}],
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["add"]
    assert request.left_out == ["tools[0] of type 'web_search_20250305'", "mcp_servers"]


LATER = {**ADD, "name": "later", "defer_loading": True}
UNUSED = {**ADD, "name": "unused", "defer_loading": True}


def functions_in(text: str) -> list[Any]:
    first, *lines, last = text.split("\n")
    assert (first, last) == ("<functions>", "</functions>")
    tags = "<function>", "</function>"
    return [json.loads(line.removeprefix(tags[0]).removesuffix(tags[1])) for line in lines]


def test_a_deferred_tool_is_shown_where_a_message_refers_to_it() -> None:
    """So the beginning of the prompt stays the same when the client has found a tool."""
    references = [{"type": "tool_reference", "tool_name": name} for name in ("later", "add")]
    found = {"role": "user", "content": [{**RESULT, "content": references}]}
    before = parsed(tools=[ADD, UNUSED])
    after = parsed(messages=[ASK, {"role": "assistant", "content": [CALL]}, found],
                   tools=[LATER, ADD, UNUSED])  # fmt: skip
    assert before.tools == after.tools
    assert before.later_tools == []
    names = [tool["function"]["name"] for tool in after.later_tools]
    assert names == ["later"]
    shown = functions_in(after.messages[-1]["content"])
    assert [one["name"] for one in shown] == ["later", "add"]
    assert shown[0] == {"name": "later", "description": "Add.", "parameters": NUMBERS}


def test_messages_add_and_remove_tools() -> None:
    given = {"type": "tool_definition", "definition": {**ADD, "name": "new"}}
    changes = [
        {"type": "tool_addition", "tool": given, **CACHED},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "add"}},
    ]
    request = parsed(messages=[ASK, {"role": "system", "content": changes}], tools=[ADD])
    text = request.messages[-1]["content"]
    assert text.endswith("</functions>The tool add is no longer available.")
    assert [tool["function"]["name"] for tool in request.later_tools] == ["new"]


def test_deferred_tools_that_only_anthropic_could_find_are_shown() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    request = parsed(tools=[search, LATER])
    assert [tool["function"]["name"] for tool in request.tools] == ["later"]
    assert request.left_out == ["tools[0] of type 'tool_search_tool_bm25_20251119'"]


def test_examples_of_a_tool_are_part_of_its_description() -> None:
    (tool,) = parsed(tools=[{**ADD, "input_examples": [{"a": 1}, {"a": 2}]}]).tools
    text = 'Add.\n\nExamples of its input:\n{"a": 1}\n{"a": 2}'
    assert tool["function"]["description"] == text


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
