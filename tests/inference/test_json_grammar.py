"""JSON schemas as grammars, against jsonschema."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglrl
from sglrl.inference.json_grammar import json_grammar
from sglrl.inference.schema_values import valid

from .schemas import PATTERNS, SCHEMAS, TEXTS, VALUES, Texts, json_text

CHECK = jsonschema.Draft202012Validator
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def answers(schema: Any, seed: int, count: int = 30) -> list[str]:
    texts = Texts(json_grammar(schema))
    chance = random.Random(seed)
    found = [texts.walk(chance) for _ in range(count)]
    return [text for text in found if text is not None]


def grammar_of(schema: Any) -> tuple[str | None, str]:
    """Return the grammar of a schema, or why there is none."""
    try:
        return json_grammar(schema), ""
    except sglrl.InvalidRequest as error:
        return None, str(error)


def check(schema: Any, text: str) -> None:
    value = json.loads(text, parse_constant=pytest.fail)
    CHECK(schema).validate(value)
    assert not isinstance(value, float) or math.isfinite(value)


@settings(max_examples=150, deadline=None)
@given(SCHEMAS, st.integers(0, 1000))
def test_every_answer_is_valid(schema: Any, seed: int) -> None:
    grammar, why = grammar_of(schema)
    if grammar is None:
        assert re.search(r"'(oneOf|maxLength|minLength|pattern)' at |no value is valid", why)
        return
    texts = Texts(grammar)
    chance = random.Random(seed)
    for _ in range(8):
        if (text := texts.walk(chance, 80)) is not None:
            check(schema, text)


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, VALUES)
def test_values_are_valid_as_jsonschema_says(schema: Any, value: Any) -> None:
    assert valid(schema, value, schema) == CHECK(schema).is_valid(value)


KEPT: list[tuple[Any, list[Any]]] = [
    ({"type": "number", "maximum": 1}, [1, 0.5, -3, 1.0, -0.25]),
    ({"type": "number", "minimum": -1.5, "maximum": 2.25}, [-1.5, 2.25, 0, -1.25, 2.2, 1.999]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1}, [0.05, 0.001, 0.0999]),
    ({"type": "integer", "minimum": 7}, [7, 9, 10, 70, 12345]),
    ({"type": "integer", "minimum": -15, "exclusiveMaximum": 13}, [-15, -1, 0, 9, 12]),
    ({"type": "integer", "multipleOf": 1}, [3, -4]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n日", '"\\']),
    ({"type": "string", "pattern": "^a.b$"}, ["axb", "a🙂b", "a'b"]),
    ({"type": "string", "pattern": "b"}, ["b", "abc", "日b"]),
    ({"type": "string", "pattern": r'^["\\]\n$'}, ['"\n', "\\\n"]),
    ({"type": "string", "minLength": 1}, ["a", 'say "hi"\n']),
    ({"type": "string", "maxLength": 500}, ["", "abc"]),
    ({"type": "string", "pattern": "^[a-z]*$", "maxLength": 3}, ["", "abc"]),
    ({"type": "string", "pattern": "^(no|yes)$", "minLength": 2}, ["no", "yes"]),
    ({"type": "string", "format": "date"}, ["2026-02-28"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 4}]}, [3, 4]),
    ({"allOf": [OBJECT, {"required": ["b"]}]}, [{"b": 1}, {"a": 1, "b": 2}]),
    ({**OBJECT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 2}]),
    ({"type": "object", "required": ["z"]}, [{"z": None}, {"z": 1, "y": 2}]),
    ({**OBJECT, "minProperties": 1, "maxProperties": 1}, [{"a": 1}, {"b": 1}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, [{}, {"xy": None}]),
    ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, [{}, {"aa": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}]),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [3, None]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1}, [[1]]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 3}, [[None] * 2]),
    ({"$defs": {"i": {"type": "integer"}}, "$ref": "#/$defs/i", "minimum": 5}, [5, 50]),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4]),
]


@pytest.mark.parametrize(("schema", "values"), KEPT)
def test_what_is_enforced(schema: Any, values: list[Any]) -> None:
    texts = Texts(json_grammar(schema))
    for value in values:
        assert json_text(value) in texts
        assert json.dumps(value) in texts or "\\u" in json.dumps(value)
    if schema.get("exclusiveMinimum") is not True:
        for text in answers(schema, 3):
            check(schema, text)


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"not": {"type": "null"}}, "not", "/"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "if", "/properties/a"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "/"),
        ({"type": "array", "items": {"contains": {}}}, "contains", "/items"),
        ({"allOf": [{"type": "integer"}, {"multipleOf": 3}]}, "multipleOf", "/allOf/1"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired", "/"),
        ({**OBJECT, "dependentSchemas": {"a": False}}, "dependentSchemas", "/"),
        ({"$ref": "https://example.com/schema.json"}, "$ref", "/"),
        ({"anyOf": [{"$ref": "#/$defs/missing"}]}, "$ref", "/anyOf/0"),
        ({"$ref": "#"}, "$ref", "/"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "/"),
        ({"oneOf": [OBJECT, {**OBJECT, "required": ["a"]}]}, "oneOf", "/"),
        ({"type": "string", "pattern": r"^(?=a)b"}, "pattern", "/"),
        ({"type": "string", "pattern": r"(a)\1"}, "pattern", "/"),
        ({"type": "string", "pattern": "("}, "pattern", "/"),
        ({"type": "string", "pattern": "^a|b$", "maxLength": 9}, "maxLength", "/"),
    ],
)
def test_what_cannot_be_enforced(schema: Any, keyword: str, path: str) -> None:
    message = re.escape(f"json_schema: '{keyword}' at {path} cannot be enforced")
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for values in ({"json_schema": schema}, {"structural_tag": tag}):
        with pytest.raises(sglrl.InvalidRequest, match=message):
            sglrl.SamplingParams(**values)


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "x"},
        {"properties": 5},
        {"minimum": "3"},
        {"minLength": "3"},
        {"type": "integer", "enum": ["a"]},
        5,
    ],
)
def test_what_is_no_schema(schema: Any) -> None:
    with pytest.raises(sglrl.InvalidRequest, match="json_schema"):
        sglrl.SamplingParams(json_schema=json.dumps(schema))


@pytest.mark.parametrize("pattern", [*PATTERNS, r"\W\D\S", "[^\\d]", "a{2,}", "x*?", "(?:a|b)+$"])
def test_patterns(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    texts = Texts(json_grammar(schema))
    for text in (*TEXTS, "aab", "b", "yes", "é", "aa", "xx", "!a!", "٣"):
        if json_text(text) in texts:
            assert re.search(pattern, text)
        elif re.search(pattern, text) and text.isascii() and text.isprintable():
            # Characters that JSON escapes are allowed only if a set has no others.
            assert {'"', "\\"} & {*text}
    for text in answers(schema, 7):
        check(schema, text)


def test_white_space() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}}
    compact, free = (Texts(json_grammar(schema, spaces=spaces)) for spaces in (False, True))
    assert '{"a": [null, null]}' in compact
    assert '{"a":[null,null]}' not in compact
    assert '{"a":[null ,\nnull]}' in free


def test_a_schema_that_refers_to_itself() -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    }
    texts = Texts(json_grammar(schema))
    assert '{"next": {"next": null}}' in texts
    assert '{"next": {}}' not in texts


def test_texts_that_end_a_call() -> None:
    markers = ("</tool_call>", "<tool_call>")
    texts = Texts(json_grammar({}, markers=markers))
    for value in ("<b>", "a < b", "x <", "<<", '<"'):
        assert json_text(value) in texts
    for value in ("</tool_call>", "<tool_call>", "</b>", "<</"):
        assert json_text(value) not in texts
        assert json_text(value).replace("<", "\\u003c") in texts
    assert '"<\\/tool_call>"' in texts
    assert '{"</tool_call>": 1}' not in texts
    only = Texts(json_grammar({"const": "</tool_call>"}, markers=markers))
    assert '"\\u003c/tool_call>"' in only
