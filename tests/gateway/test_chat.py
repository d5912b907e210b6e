"""OpenAI's chat completions without a server: requests, and what a client sends back."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import InvalidRequest
from sglrl.gateway.answers import json_text
from sglrl.gateway.chat import CHAT, ChatRequest
from sglrl.gateway.conversations import Digest
from sglrl.gateway.dialect import TurnRequest

ASK = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "add"}}


def parsed(**fields: Any) -> TurnRequest:
    (made,) = CHAT.parse(json.dumps({"messages": [ASK], **fields}).encode()).turns()
    return made


def test_names_of_openai_become_ours() -> None:
    request = parsed(
        max_completion_tokens=7, stop=["x"], logit_bias={"5": -2}, n=3, min_tokens=2, user="me",
        store=True, response_format={"type": "json_object"}, top_k=5, seed=None,
    )  # fmt: skip
    assert request.sampling == {
        "max_new_tokens": 7,
        "stop": ["x"],
        "logit_bias": {"5": -2.0},
        "min_new_tokens": 2,
        "json_schema": {"type": "object"},
        "top_k": 5,
    }
    assert request.choices == 3
    assert parsed().sampling == {}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert parsed(response_format=form).sampling["json_schema"] == schema
    newer = {"type": "structural_tag", "format": {"type": "const_string", "value": "Hi"}}
    begin = {"begin": "<a>", "schema": schema, "end": "</a>"}
    older = {"type": "structural_tag", "structures": [begin], "triggers": ["<a>"]}
    for tag in (newer, older):
        assert parsed(response_format=tag).sampling == {"structural_tag": tag}


def test_the_role_developer_is_system() -> None:
    """Many chat templates omit messages of roles that they do not know."""
    first, *rest = parsed(messages=[{"role": "developer", "content": "Brief."}, ASK]).messages or ()
    assert first == {"role": "system", "content": "Brief."}
    assert rest == [ASK]


def test_arguments_of_the_chat_template() -> None:
    def template(**fields: Any) -> Any:
        return parsed(**fields).chat_template_kwargs

    assert template() is None
    assert template(reasoning_effort=None, verbosity=None, chat_template_kwargs={}) is None
    assert template(verbosity="low") == {"verbosity": "low"}
    none = {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert template(reasoning_effort="none") == none
    high = {"reasoning_effort": "high", "enable_thinking": True, "thinking": True}
    assert template(reasoning_effort="high") == high
    own = {"enable_thinking": False, "a": 1}
    assert template(reasoning_effort="high", chat_template_kwargs=own) == {**high, **own}


def test_tools_are_hidden_if_none_may_be_called() -> None:
    tools = [TOOL]
    assert parsed(tools=tools).tools == tools
    assert parsed(tools=tools, tool_choice="none").tools is None
    assert parsed(tools=tools, tool_choice="none").tool_choice == "auto"
    assert parsed(tools=[]).tools is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "Expected `array`"),
        ({"max_tokens": "7"}, "Expected `int | null`, got `str` - at `max_tokens`"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ: give one of them"),
        ({"n": 0}, "n must be in 1..128, got 0"),
        ({"n": 10**9}, "n must be in 1..128"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs=true"),
        ({"return_routed_experts": True, "n": 2}, "needs n=1 and a single prompt"),
        ({"routed_experts_start_len": 2}, "needs return_routed_experts=true"),
        ({"audio": {"voice": "x"}}, "the field 'audio' is not supported"),
        ({"max_token": 4}, "'max_token' is not supported; did you mean 'max_tokens'?"),
        ({"temprature": 1}, "'temprature' is not supported; did you mean 'temperature'?"),
        ({"functions": [{}]}, "'functions' is not supported; use tools"),
        ({"response_format": {"type": "xml"}}, "Invalid enum value 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<a>"]}}, "needs either"),
        ({"separate_reasoning": False}, "the field 'separate_reasoning' is not supported"),
        ({"stream_reasoning": 1}, "the field 'stream_reasoning' is not supported"),
        ({"stream_options": {"continuous_usage_stats": True}}, "use include_usage"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}]},
            "custom.input must be text",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name is missing"),
        ({"tools": [TOOL, {"function": {}}]}, "tools[1].function.name is missing"),
        ({"tools": [{"function": {"name": 7}}]}, "tools[0].function.name is missing, or is not"),
        ({"tools": [{"name": "add"}]}, "tools[0].function.name is missing"),
    ],
)
def test_a_field_is_honoured_or_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parsed(**fields)
    assert message in str(error.value)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    parsed(audio=None, functions=[], modalities=None, parallel_tool_calls=False, logprobs=False)
    # prime-rl sends the version of the weights.
    assert parsed(cache_salt="3") == parsed()
    assert parsed(add_generation_prompt=True, best_of=1, length_penalty=1.0) == parsed()
    assert not parsed(tools=[TOOL], parallel_tool_calls=False).parallel_tool_calls
    assert parsed(web_search_options={}).left_out == ["web_search_options"]
    parsed(modalities=["text"], voice=False, separate_reasoning=True, stream_reasoning=True)
    for fields in ({"modalities": ["audio"]}, {"voice": 0}, {"functions": [{}]},
                   {"add_generation_prompt": False}, {"best_of": 2}):  # fmt: skip
        with pytest.raises(InvalidRequest, match="is not supported"):
            parsed(**fields)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*ChatRequest.__struct_fields__, "other"]), JSON))
def test_any_fields_are_parsed_or_rejected(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        parsed(**fields)


@given(st.binary(max_size=64) | st.sampled_from([b"[" * 100_000, b'{"a":' * 100_000, b"\xff{}"]))
def test_any_bytes_are_parsed_or_rejected(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        CHAT.parse(body)


# --- recognizing a conversation -------------------------------------------------------------------


def call(arguments: Any, name: str = "add", id_: str = "call_0_0") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


OURS = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Hm.",
    "tool_calls": [call('{"a": 1, "b": [2]}')],
}


@pytest.mark.parametrize(
    "theirs",
    [
        {"role": "assistant", "content": None, "tool_calls": [call('{"b":[2],"a":1}')]},
        {"role": "assistant", "tool_calls": [call({"a": 1, "b": [2]})]},
        {**OURS, "reasoning_content": None, "refusal": None, "audio": None, "content": "\n"},
    ],
)
def test_the_same_answer_in_another_form(theirs: dict[str, Any]) -> None:
    assert Digest([ASK, theirs], {}).beginnings == Digest([ASK, OURS], {}).beginnings


@pytest.mark.parametrize(
    "theirs",
    [
        {**OURS, "content": "!"},
        {**OURS, "tool_calls": []},
        {**OURS, "tool_calls": [call('{"a": 1, "b": [3]}')]},
        {**OURS, "tool_calls": [call('{"a": 1, "b": [2]}', "sub")]},
        {**OURS, "tool_calls": [call('{"a": 1, "b": [2]}', id_="call_0_1")]},
        {**OURS, "role": "user"},
    ],
)
def test_another_answer(theirs: dict[str, Any]) -> None:
    assert Digest([ASK, theirs], {}).beginnings[0] == Digest([ASK, OURS], {}).beginnings[0]
    assert Digest([ASK, theirs], {}).beginnings[1] != Digest([ASK, OURS], {}).beginnings[1]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ('{"a": 1.0, "b": [-0.0]}', {"a": 1, "b": [0]}),
        ('{"a": 12345678901234567890}', {"a": 12345678901234567000}),
        ('{"a": NaN, "b": Infinity}', {"a": None, "b": None}),
    ],
)
def test_arguments_that_javascript_has_read(ours: str, theirs: Any) -> None:
    """Its numbers are floats, which it writes in another form."""
    said, back, other = (
        {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
        for arguments in (ours, theirs, {**theirs, "a": 2})
    )
    assert Digest([back], {}).beginnings == Digest([said], {}).beginnings
    assert Digest([other], {}).beginnings != Digest([said], {}).beginnings


def test_other_tools_make_another_conversation() -> None:
    assert Digest([ASK], {"tools": None}).beginnings != Digest([ASK], {"tools": [{}]}).beginnings


@given(st.lists(st.text(max_size=3), min_size=2, max_size=5))
def test_two_messages_are_not_one(texts: list[str]) -> None:
    several = [{"role": "user", "content": text} for text in texts]
    one = [{"role": "user", "content": "".join(texts)}]
    assert Digest(several, {}).beginnings[-1] != Digest(one, {}).beginnings[-1]


def test_arguments_of_calls_with_half_of_a_surrogate_pair() -> None:
    for value, text in ({"a": "\ud800"}, r'{"a": "\ud800"}'), ({"a": "ü"}, '{"a": "ü"}'):
        assert json_text(value) == text
        msgspec.json.encode(json_text(value))
