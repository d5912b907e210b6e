"""Calls of tools in every format: what the grammar allows, the parser reads as valid arguments."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sessions.families import FAMILIES, family_tokenizer
from sessions.grammars import Allowed

import sglrl
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.tokens import TokenizerBox
from sglrl.inference.tool_choice import calls_format

from .schemas import DEFINITIONS, NAMES, PARTS, TEXTS, VALUES, objects

CHECK = jsonschema.Draft202012Validator
WRITTEN = [name for name in FAMILIES if name != "gemma4"]
TAGGED = [name for name in WRITTEN if name not in ("qwen3", "llama-3")]
PLAIN = tuple(name for name in NAMES if name.isidentifier())
PARAMETERS = objects(PARTS, PLAIN).map(lambda schema: {**schema, "$defs": DEFINITIONS})
ASK = [{"role": "user", "content": "Hi"}]
MARKS = ("<", "call", "function", "arg", "parameter")


@pytest.fixture(scope="module", params=WRITTEN)
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    family_tokenizer(folder, FAMILIES[request.param])
    options = {"enable_thinking": False}
    if request.param == "llama-3":
        options = {"date_string": "26 Jul 2024"}  # type: ignore[dict-item]
    found = find_renderer(FAMILIES[request.param].renderers[0], TokenizerBox(str(folder)), options)
    assert found is not None
    return found


def with_tool(renderer: Renderer, parameters: Any) -> Renderer:
    function = {"name": "look_up", "description": "Look it up.", "parameters": parameters}
    return renderer.with_tools([{"type": "function", "function": function}])


def prompt_of(renderer: Renderer) -> list[int]:
    found: list[int] = renderer._renderer.render_ids(ASK, add_generation_prompt=True)
    return found


def written(renderer: Renderer, arguments: dict[str, Any]) -> list[int]:
    """Return the tokens of a call as the template writes it."""
    call = {"id": "c", "type": "function"}
    function = {"name": "look_up", "arguments": arguments}
    said = {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
    prompt = prompt_of(renderer)
    whole = renderer._renderer.render_ids([*ASK, said])
    assert whole[: len(prompt)] == prompt
    ids = whole[len(prompt) :]
    end = next((at for at, token in enumerate(ids) if token in renderer.end_tokens), len(ids))
    while end and not renderer.decode(ids[end - 1 : end]).strip():
        end -= 1
    found: list[int] = ids[:end]
    return found


def read(renderer: Renderer, ids: list[int]) -> Any:
    (call,) = renderer.parse(prompt_of(renderer), ids, 0).tool_calls
    assert (call.name, call.error) == ("look_up", "")
    return call.arguments


# Each example compiles a grammar, which takes long beside other work.
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=PARAMETERS, seed=st.integers(0, 1000))
def test_what_the_grammar_allows_is_read(renderer: Renderer, schema: Any, seed: int) -> None:
    calls = with_tool(renderer, schema)
    try:
        form = calls_format(calls, "look_up")
    except sglrl.InvalidRequest:
        assume(False)
    allowed = Allowed(calls, form)
    chance = random.Random(seed)
    for _ in range(4):
        ids = allowed.walk(chance, "", 150)
        if ids is not None:
            arguments = read(calls, ids)
            CHECK(schema).validate(arguments)
            json.dumps(arguments, allow_nan=False)


def meant(schema: Any, value: Any) -> bool:
    """Whether the text of a value in tags can mean only this value."""
    if isinstance(value, str):
        try:
            other = json.loads(value)
        except ValueError:
            return True
        return isinstance(other, str) or not CHECK(schema).is_valid(other)
    return True


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=PARTS, value=VALUES)
def test_what_the_template_writes_is_read(renderer: Renderer, schema: Any, value: Any) -> None:
    definitions = {"$defs": DEFINITIONS, "type": "object"}
    parameters = {**definitions, "properties": {"a": schema}, "required": ["a"]}
    assume(CHECK(parameters).is_valid({"a": value}))
    own = {**schema, "$defs": DEFINITIONS} if isinstance(schema, dict) else schema
    assume(meant(own, value) or renderer.call_style.tagged is False)  # type: ignore[union-attr]
    calls = with_tool(renderer, parameters)
    ids = written(calls, {"a": value})
    assert read(calls, ids) == {"a": value}


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
CASES: list[tuple[Any, Any]] = [
    ({"$ref": "#/$defs/t"}, "5"),
    ({"const": "x"}, "x"),
    ({"const": 5}, 5),
    ({"enum": ["1", "b"]}, "1"),
    ({"enum": ["1", 2]}, 2),
    ({"type": ["string", "null"]}, "123"),
    ({"type": ["string", "null"]}, None),
    (NULLABLE, "123"),
    (NULLABLE, None),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "true"),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "[1]"),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.5"),
    ({}, "hello"),
    ({}, {"a": [1, None]}),
    (True, "hello"),
    ({"description": "Anything."}, True),
    ({"type": "string"}, " two  words\n\n"),
    ({"type": "string"}, "NaN"),
    ({"type": "array", "items": {"type": "string"}}, ["</b>", "x"]),
]


@pytest.mark.parametrize(("schema", "value"), CASES)
def test_arguments(renderer: Renderer, schema: Any, value: Any) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {"t": {"type": "string"}},
    }
    calls = with_tool(renderer, parameters)
    ids = written(calls, {"a": value})
    assert read(calls, ids) == {"a": value}
    if "</" not in json.dumps(value):
        allowed = Allowed(calls, calls_format(calls, "required"))
        text = renderer.decode(ids).strip()
        spaced = ("", calls.call_style.space), ("", "\n")  # type: ignore[union-attr]
        assert any(allowed(before + text + after) for before in spaced[0] for after in spaced[1])


def test_a_tool_without_arguments(renderer: Renderer) -> None:
    for parameters in (None, {"type": "object", "properties": {}}):
        calls = with_tool(renderer, parameters)
        allowed = Allowed(calls, calls_format(calls, "required"))
        ids = allowed.walk(random.Random(2), "", 100)
        assert ids is not None
        assert read(calls, ids) == {}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_cannot_write(renderer: Renderer, number: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    calls = with_tool(renderer, schema)
    text = renderer.decode(written(calls, {"a": 77}))
    for wrong in (text.replace("77", number), text.replace("77", f"[{number}]")):
        (call,) = calls.parse(prompt_of(calls), calls.encode(wrong), 0).tool_calls
        assert (call.arguments, call.error) == (None, "its arguments are not JSON")


def test_texts(renderer: Renderer) -> None:
    """Texts that look like something else, at random places."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    calls = with_tool(renderer, schema)
    chance = random.Random(1)
    for _ in range(50):
        texts = ["".join(chance.choices(TEXTS, k=chance.randint(0, 4))) for _ in "ab"]
        arguments = dict(zip("ab", texts, strict=True))
        assert read(calls, written(calls, arguments)) == arguments
