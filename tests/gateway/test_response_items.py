"""OpenAI's Responses API: the fields and items of requests, without a server."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import InvalidRequest
from sglrl.gateway.conversations import Digest
from sglrl.gateway.dialect import Message, Stored, TurnRequest
from sglrl.gateway.response_items import messages_of
from sglrl.gateway.responses import ResponsesRequest, parse

ASK = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object"},
    "strict": True,
}
LOGPROBS = "message.output_text.logprobs"


def parsed(**fields: Any) -> TurnRequest:
    (made,) = parse(json.dumps({"input": "Hi", **fields}).encode()).turns()
    return made


# --- fields ---------------------------------------------------------------------------------------


def test_names_of_openai_become_ours() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = parsed(
        instructions="Be brief.", max_output_tokens=7, temperature=0.5, top_k=5, min_tokens=2,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        user="me", store=True, metadata={"a": "b"}, reasoning={"effort": "low", "summary": "auto"},
        include=[LOGPROBS, "reasoning.encrypted_content"], top_logprobs=3, truncation="disabled",
        background=False, conversation=None, stream=True, prompt_cache_options={"ttl": "30m"},
    )  # fmt: skip
    assert request.messages == [{"role": "system", "content": "Be brief."}, ASK]
    assert request.sampling == {
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_k": 5,
        "min_new_tokens": 2,
        "json_schema": schema,
    }
    assert (request.top_logprobs, request.stream, request.choices) == (3, True, 1)
    assert parsed(text={"format": {"type": "text"}, "verbosity": "medium"}).sampling == {}
    hints = parsed(reasoning={"effort": "none"}, text={"verbosity": "low"}).chat_template_kwargs
    assert hints == {
        "reasoning_effort": "none", "enable_thinking": False, "thinking": False, "verbosity": "low",
    }  # fmt: skip
    form = {"format": {"type": "json_object"}}
    assert parsed(text=form).sampling == {"json_schema": {"type": "object"}}


def test_tools_have_the_form_of_chat_completions() -> None:
    function = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    made = [{"type": "function", "function": function}]
    assert parsed(tools=[TOOL]).tools == made
    assert parsed(tools=[TOOL]).tool_choice == "auto"
    assert parsed(tools=[TOOL], tool_choice="none").tools is None
    assert parsed(tools=[TOOL], tool_choice="none").tool_choice == "auto"
    assert parsed(tools=[TOOL], tool_choice="required").tool_choice == "required"
    named = parsed(tools=[TOOL], tool_choice={"type": "function", "name": "add"})
    assert named.tool_choice == {"type": "function", "function": {"name": "add"}}
    bare = parsed(tools=[{"type": "function", "name": "f", "parameters": None, "async": False}])
    assert bare.tools == [{"type": "function", "function": {"name": "f"}}]
    assert parsed(tools=[]).tools is None


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: WORD"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Others.",
    "tools": [{**TOOL, "name": "close"}, {**PATCH, "format": {"type": "text"}}],
}


def test_tools_of_codex_are_shown_or_left_out() -> None:
    search = {"type": "web_search", "external_web_access": True}
    wait = {**TOOL, "defer_loading": True, "output_schema": {"type": "object"}, "name": "wait"}
    request = parsed(
        tools=[PATCH, AGENTS, search, wait, {"type": "tool_search", "execution": "client"}],
        client_metadata={"session_id": "1"}, reasoning={"summary": "detailed", "context": "auto"},
        max_tool_calls=3, include=["web_search_call.action.sources"],
    )  # fmt: skip
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    assert [*functions] == ["apply_patch", "agents__close", "agents__apply_patch", "wait"]
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert functions["apply_patch"] == {
        "name": "apply_patch",
        "description": "Edit files.\n\nThe input follows this lark grammar:\nstart: WORD",
        "parameters": text,
    }
    assert functions["agents__apply_patch"]["description"] == "Edit files."
    assert request.left_out == ["tools[2] of type 'web_search'", "tools[4] of type 'tool_search'"]
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "close", "namespace": "agents"}, "agents__close"),
    ):
        chosen = parsed(tools=[PATCH, AGENTS], tool_choice=choice).tool_choice
        assert chosen == {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "'input' is missing or empty"),
        ({"input": []}, "'input' is missing or empty"),
        ({"input": ["x"]}, "Expected `object`, got `str` - at `input[0]`"),
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0"),
        ({"max_tokens": 4}, "'max_tokens' is not supported; use max_output_tokens"),
        ({"max_output_token": 4}, "not supported; did you mean 'max_output_tokens'?"),
        ({"tools": [{**TOOL, "parameter": {"a": 1}}]}, "supported; did you mean 'parameters'?"),
        ({"messages": [ASK]}, "'messages' is not supported; use input"),
        ({"conversation": "conv_1"}, "'conversation' is not supported; use previous_response_id"),
        ({"background": True}, "'background' is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "'prompt' is not supported"),
        ({"truncation": "auto"}, "'truncation' is not supported"),
        ({"top_logprobs": 2}, "top_logprobs needs include=['message.output_text.logprobs']"),
        ({"include": ["other"]}, "include has 'other'"),
        ({"text": {"verbosity": "tiny"}}, "text.verbosity must be one of 'low', 'medium', 'high'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type must be one of"),
        ({"text": {"format": "text"}}, "text.format must be an object"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        ({"text": {"format": {"type": "text", "x": 1}}}, "'text.format.x' is not supported"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort must be one of"),
        ({"reasoning": {"mode": "pro"}}, "'reasoning.mode' is not supported"),
        ({"tools": [TOOL, {**TOOL, "type": "custom"}]}, "tools[1].parameters' is not supported"),
        (
            {"tools": [TOOL, {"type": "custom", "name": "add"}]},
            "tools[1] has the same name as",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "description": "", "tools": "x"}]},
            "tools[0].tools must be a list of tools",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x"}}]},
            "'tools[0].function' is not",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name must be a string"),
        ({"tools": [{**TOOL, "async": True}]}, "'tools[0].async' is not supported"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice 'allowed_tools' is not"),
        ({"tool_choice": "add"}, "tool_choice 'add' is not supported"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name must be a string"),
    ],
)
def test_a_field_is_honoured_or_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parsed(**fields)
    assert message in str(error.value)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    given = parsed(
        background=False, conversation=None, prompt=None, max_tool_calls=None, text=None, tools=[],
        reasoning={"effort": None, "mode": None}, include=[], parallel_tool_calls=False,
        tool_choice=None, truncation=None, context_management=[],
    )  # fmt: skip
    assert msgspec.structs.replace(given, stored=Stored()) == parsed(store=False)
    named = {"type": "function", "name": "add"}
    parsed(tools=[TOOL], tool_choice=named, parallel_tool_calls=False)
    parsed(tools=[TOOL], tool_choice="none", parallel_tool_calls=False)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["type", "role", "content", "text", "name", "arguments", "call_id", "output", "id", "format"]
)
KINDS = st.sampled_from(
    ["message", "reasoning", "function_call", "function_call_output", "item_reference", "function",
     "input_text", "refusal", "reasoning_text", "assistant", "user", "json_schema"]
)  # fmt: skip
OBJECTS = st.recursive(
    st.dictionaries(KEYS, KINDS | JSON, max_size=5),
    lambda inner: st.dictionaries(KEYS, KINDS | inner | st.lists(inner, max_size=3), max_size=5),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from([*ResponsesRequest.__struct_fields__, "other"]),
        JSON | OBJECTS | st.lists(OBJECTS, max_size=3),
    )
)
def test_any_fields_are_parsed_or_rejected(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        Digest(parsed(**fields).messages or (), {})


# --- input items ----------------------------------------------------------------------------------


def said(*texts: str, kind: str = "output_text", key: str = "text") -> dict[str, Any]:
    parts = [{"type": kind, key: text, "annotations": []} for text in texts]
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": parts}


def thought(*texts: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}


def called(id_: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": id_, "name": "add", "arguments": arguments}


def result(id_: str, output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id_, "output": output}


def call(id_: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}


def answer(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SIX = [{"type": "input_text", "text": "6"}]
HIDDEN = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("Hi", [ASK]),
        ([ASK], [ASK]),
        (
            [
                {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
                {"role": "system", "content": "Really."},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"},
                ]},
            ],
            [
                {"role": "system", "content": "Be brief."},
                {"role": "system", "content": "Really."},
                ASK,
            ],
        ),
        ([{"role": "assistant", "content": "Yes."}], [answer("Yes.")]),
        ([said("Y", "es.")], [answer("Yes.")]),
        ([said("No.", kind="refusal", key="refusal")], [answer("No.")]),
        ([said("")], [answer("")]),
        (
            [thought("H", "m."), said("Yes."), called("a"), called("b", "[")],
            [answer("Yes.", reasoning_content="Hm.", tool_calls=[call("a"), call("b", "[")])],
        ),
        ([thought("Hm."), called("a")], [
            answer(reasoning_content="Hm.", tool_calls=[call("a")]),
        ]),
        ([called("a"), result("a"), called("b"), result("b", SIX)], [
            answer(tool_calls=[call("a")]),
            {"role": "tool", "tool_call_id": "a", "content": "5"},
            answer(tool_calls=[call("b")]),
            {"role": "tool", "tool_call_id": "b", "content": "6"},
        ]),
        ([said("A"), said("B")], [answer("A"), answer("B")]),
        ([called("a"), said("B")], [answer(tool_calls=[call("a")]), answer("B")]),
        ([said("A"), thought("Hm."), called("b")], [
            answer("A"), answer(reasoning_content="Hm.", tool_calls=[call("b")]),
        ]),
        # Without the text of the reasoning, as some clients return it.
        ([HIDDEN, said("A"), HIDDEN, called("b"), HIDDEN], [
            answer("A"), answer(tool_calls=[call("b")]),
        ]),
    ],
)  # fmt: skip
def test_items_become_messages(items: Any, messages: list[Message]) -> None:
    assert messages_of(items) == messages


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "tool", "content": "x"}, "[1].role must be one of 'user', 'system', 'developer'"),
        ({"role": "user"}, "[1].content is missing"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "content[0] is of type 'input_im"),
        ({"role": "user", "content": ["x"]}, "content[0] is of type None, and only text"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text must be a string"),
        ({"type": "function_call", "name": "add", "arguments": "{}"}, "[1].call_id must be a str"),
        ({**called("a"), "arguments": {}}, "[1].arguments must be a string, got {}"),
        ({"type": "function_call_output", "output": "x"}, "[1].call_id must be a string"),
        (result("a", {"x": 1}), "[1].output must be text or a list of parts"),
        ({"type": "item_reference", "id": "msg_1"}, "[1] refers to an item, which is not supp"),
        ({"id": "msg_1"}, "[1] refers to an item, which is not supported: send the item"),
        ({"type": "web_search_call"}, "[1] is of type 'web_search_call', which is not supported"),
        ({}, "[1] is of type None"),
    ],
)
def test_an_item_is_understood_or_rejected(item: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        messages_of([ASK, item])
    assert message in str(error.value)
    assert str(error.value).startswith("input[1]")


def test_what_is_stored() -> None:
    first, second = parse(b'{"input": "Hi"}'), parse(b'{"input": "Hi", "store": false}')
    assert first.turns()[0].stored == Stored(id=first.id)
    assert second.turns()[0].stored == Stored()
    more = parsed(instructions="X", previous_response_id="resp_1", store=False, input=[])
    assert more.stored == Stored(previous="resp_1", unstored=1)
