"""Sampling values: wrong values are refused before sending, right values arrive unchanged."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import InvalidRequest
from sglrl.inference.sampling import ALIASES, SamplingOptions, SamplingParams, SentSampling
from sglrl.inference.sampling_cache import Prepared, SamplingCache
from sglrl.inference.sampling_fields import MAX_BIAS, TOP_K_ALL

NAN, INF = math.nan, math.inf

BAD: dict[str, dict[str, list[Any]]] = {
    "must be in": {
        "temperature": [NAN, INF, -INF, -0.1, 10**400, np.float32("nan"), 1e39],
        "top_p": [NAN, 0.0, 0, 1.1, -0.5],
        "min_p": [NAN, -0.1, 1.1],
        "frequency_penalty": [NAN, -2.1, 2.1],
        "presence_penalty": [NAN, -2.1, 2.1],
        "repetition_penalty": [NAN, 0.0, -1.0, 2.1, 1e-46],
        "logit_bias": [{1: NAN}, {1: INF}, {1: 1e7}],
    },
    "must be a number": {
        name: [True, "1", b"1", [1.0], np.array([1.0, 2.0]), 1j, np.bool_(True)]
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
        )
    },
    "must be an integer": {
        name: [True, "1", 1.0, [1], np.array([1, 2]), np.float64(1), np.bool_(True), Decimal(1)]
        for name in ("max_new_tokens", "top_k", "min_new_tokens", "seed")
    }
    | {"logit_bias": [{"a": 1}, {1.5: 1}, {True: 1}, {None: 1}, {"9" * 5000: 1}]}
    | {"stop_token_ids": [["a"], [1.0], [True], [None], np.array([[1]])]},
    "must be at least": {
        "max_new_tokens": [0, -1],
        "top_k": [0, -2],
        "min_new_tokens": [-1],
        "seed": [-1],
        "stop_token_ids": [[-1], (3, -1)],
        "logit_bias": [{-1: 1}],
    },
    "must be at most": {
        "seed": [1 << 62, 1 << 80],
        "max_new_tokens": [1 << 31, 1 << 70],
        "stop_token_ids": [[1 << 70]],
    },
    "must be a list of token ids": {"stop_token_ids": [5, "12", b"12", iter([1]), np.array(5)]},
    "must be a string or a list of strings": {
        name: [5, [5], ["a", None], {"a"}, b"a"] for name in ("stop", "stop_regex")
    },
    "is not a regular expression": {"stop_regex": ["(", ["a", "[b"]]},
    "must be a dict of token id and bias": {"logit_bias": [5, [1, 2], "3", {1}]},
    "stop has an empty string": {"stop": ["", ["a", ""]]},
    "lone surrogate": {
        "stop": ["\ud800", ["a", "\ud800"]],
        "stop_regex": ["\ud800"],
        "regex": ["\ud800"],
        "ebnf": ["\ud800"],
    },
    "must be True or False": {
        "ignore_eos": [1, 0, "yes"],
        "skip_special_tokens": [1, 0, "no"],
        "no_stop_trim": [1, "no"],
    },
    "is not JSON": {
        name: ["{", "", "\ud800", "[" * 100_000] for name in ("json_schema", "structural_tag")
    },
    "must be a dict or JSON text": {
        name: [5, ["a"], b"{}", np.array([1, 2])] for name in ("json_schema", "structural_tag")
    },
    "cannot be written as JSON": {
        name: [{"a": object()}, {"a": "\ud800"}, {(1,): 2}]
        for name in ("json_schema", "structural_tag")
    },
    "must be a string": {"regex": [5, b"a"], "ebnf": [5, ["a"]]},
    "NUL": {
        "regex": ["\0", "a\0b"],
        "ebnf": ['root ::= "\0"'],
        "json_schema": [
            {"type": "string", "pattern": "\0"},
            '{"items": [{"patternProperties": {"a\\u0000": true}}]}',
        ],
        "structural_tag": [{"format": {"type": "regex", "pattern": "a\0"}}],
    },
}


def describe(value: Any) -> str:
    return f"{value!a:.20}"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        pytest.param(name, value, text, id=f"{name}={describe(value)}")
        for text, by_name in BAD.items()
        for name, values in by_name.items()
        for value in values
    ],
)
def test_bad_value(name: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value) or name == "stop"
    with pytest.raises(InvalidRequest, match=text):
        SamplingCache(100).prepare(None, {name: value})


@given(
    name=st.sampled_from(SamplingParams.__struct_fields__),
    value=st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.lists(st.integers(-1, 200) | st.text(max_size=2), max_size=3)
    | st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
def test_any_value_is_refused_or_can_be_sent(name: str, value: Any) -> None:
    cache = SamplingCache(100)
    try:
        prepared = cache.prepare(None, {name: value})
    except InvalidRequest:
        return
    raw = prepared.wire(prepared.max_new_tokens or 16, prepared.seed)
    if prepared.max_new_tokens is None or prepared.max_new_tokens < 1 << 63:
        msgspec.msgpack.decode(raw, type=SentSampling)


def test_contradictions() -> None:
    with pytest.raises(InvalidRequest, match="min_new_tokens=9 is more than max_new_tokens=8"):
        SamplingParams(min_new_tokens=9, max_new_tokens=8)
    with pytest.raises(InvalidRequest, match="only one of json_schema and regex"):
        SamplingParams(json_schema={"type": "object"}, regex="a+")
    with pytest.raises(InvalidRequest, match="only one of json_schema and ebnf"):
        SamplingParams(json_schema={}, ebnf='root ::= "a"')
    with pytest.raises(InvalidRequest, match="only one of regex and structural_tag"):
        SamplingParams(regex="a", structural_tag={})
    with pytest.raises(InvalidRequest, match="only one of regex and ebnf"):
        SamplingCache(9).prepare(SamplingParams(regex="a"), {"ebnf": "b"})


def test_stop_token_outside_the_vocabulary() -> None:
    with pytest.raises(InvalidRequest, match="logit_bias holds 100; the vocabulary has 100"):
        SamplingCache(100).prepare(None, {"logit_bias": {99: 1.0, "100": 1.0}})
    with pytest.raises(InvalidRequest, match="stop_token_ids holds 100; the vocabulary has 100"):
        SamplingCache(100).prepare(None, {"stop_token_ids": [99, 100]})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("max_new_token", "max_new_tokens"),
        ("top-p", "top_p"),
        ("max_completion_token", "max_completion_tokens"),
        ("stop_tokens_ids", "stop_token_ids"),
    ],
)
def test_unknown_name_suggests_the_near_one(name: str, near: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingCache(9).prepare(None, {name: 1})
    assert str(caught.value) == f"unknown sampling argument {name!r}; did you mean {near!r}?"


def test_a_name_of_sglang_that_is_another_argument_here() -> None:
    with pytest.raises(InvalidRequest, match=r"argument 'return_logprob'; use logprobs=$"):
        SamplingCache(9).prepare(None, {"return_logprob": True})


def test_unknown_name_far_from_all() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown sampling argument 'zzz'$"):
        SamplingCache(9).prepare(None, {"zzz": 1})


def test_the_typed_options_are_all_fields_and_aliases() -> None:
    assert {*SamplingOptions.__annotations__} == {*SamplingParams.__struct_fields__, *ALIASES}


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_aliases(alias: str, name: str) -> None:
    numbers = name.endswith("tokens") or name == "seed"
    value: Any = 7 if numbers else name == "no_stop_trim" or "{}"
    cache = SamplingCache(9)
    assert getattr(cache.prepare(None, {alias: value}).params, name) == value
    with pytest.raises(InvalidRequest, match=f"another name for '{name}' were both given"):
        cache.prepare(None, {name: value, alias: value})


def test_none_means_not_given() -> None:
    params = SamplingParams(temperature=0.5, stop="x")
    merged = SamplingCache(9).prepare(params, {"temperature": None, "top_k": 3}).params
    assert (merged.temperature, merged.top_k, merged.stop) == (0.5, 3, "x")


def test_keywords_override_and_are_checked() -> None:
    cache = SamplingCache(9)
    params = SamplingParams(temperature=0.5)
    assert cache.prepare(params, {"temperature": 0.0}).params.temperature == 0.0
    with pytest.raises(InvalidRequest, match="temperature must be in"):
        cache.prepare(params, {"temperature": NAN})
    with pytest.raises(InvalidRequest, match=r"must be a sglrl\.SamplingParams, got dict"):
        cache.prepare({"temperature": 1.0}, {})  # type: ignore[arg-type]


def test_cache_finds_what_was_checked() -> None:
    cache = SamplingCache(100)
    params = SamplingParams(top_k=5)
    assert cache.prepare(params, {}) is cache.prepare(params, {})
    kwargs = {"temperature": 0.5, "stop": ("a", "b")}
    assert cache.prepare(None, kwargs) is cache.prepare(None, dict(kwargs))
    assert cache.prepare(None, {"stop": ["a"]}).params.stop_strings == ("a",)


def test_cache_does_not_take_true_for_one() -> None:
    cache = SamplingCache(100)
    cache.prepare(None, {"max_new_tokens": 1})
    cache.prepare(None, {"temperature": 1})
    cache.prepare(None, {"ignore_eos": True})
    for bad in ({"max_new_tokens": True}, {"temperature": True}, {"ignore_eos": 1}):
        with pytest.raises(InvalidRequest):
            cache.prepare(None, bad)


def test_caches_are_bounded() -> None:
    cache = SamplingCache(100)
    kept = [SamplingParams(seed=n) for n in range(3000)]
    for n, params in enumerate(kept):
        cache.prepare(None, {"seed": n})
        cache.prepare(params, {})
    assert len(cache._by_kwargs) <= 1024
    assert len(cache._by_params) <= 1024
    prepared = Prepared(SamplingParams())
    for n in range(1000):
        prepared.wire(n + 1, None)
    assert len(prepared._wire) <= 65


def test_wire_form() -> None:
    params = SamplingParams(
        temperature=0,
        top_k=np.int64(7),  # type: ignore[arg-type]
        stop="x",
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        min_new_tokens=np.int32(5),  # type: ignore[arg-type]
        repetition_penalty=np.float32(1.5),  # type: ignore[arg-type]
        json_schema=MappingProxyType({"type": "object"}),
        stop_regex=["a+", "b"],
        logit_bias={3: -INF, "4": -1e9, np.int64(5): np.float32(2)},  # type: ignore[dict-item]
    )
    raw = Prepared(params).wire(8, 11)
    assert msgspec.msgpack.decode(raw, type=SentSampling) == SentSampling(
        max_new_tokens=8,
        temperature=0.0,
        top_p=1.0,
        top_k=7,
        min_p=0.0,
        stop=["x"],
        stop_token_ids=[3, 4],
        min_new_tokens=5,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.5,
        ignore_eos=False,
        seed=11,
        json_schema='{"type":"object"}',
        regex=None,
        ebnf=None,
        skip_special_tokens=True,
        stop_regex=["a+", "b"],
        logit_bias={3: -1e6, 4: -1e6, 5: 2.0},
        structural_tag=None,
    )


def test_wire_form_of_the_defaults() -> None:
    wire = SamplingParams().to_wire(128, None)
    assert wire == {"max_new_tokens": 128, "seed": None}
    assert msgspec.convert(wire, SentSampling) == SentSampling(max_new_tokens=128)
    assert SamplingParams(top_k=1 << 70).to_wire(1, None)["top_k"] == TOP_K_ALL


def test_an_empty_schema_is_a_grammar_too() -> None:
    """A grammar ends by itself, so end-of-sequence must not be ignored."""
    wire = SamplingParams(json_schema={}, ignore_eos=True).to_wire(5, None)
    assert wire == {"max_new_tokens": 5, "seed": None, "json_schema": "{}"}


def test_numpy_integers_become_plain_ones() -> None:
    prepared = Prepared(
        SamplingParams(max_new_tokens=np.int64(5), seed=np.int64(6))  # type: ignore[arg-type]
    )
    assert type(prepared.max_new_tokens) is type(prepared.seed) is int


def test_wire_form_is_encoded_once() -> None:
    prepared = Prepared(SamplingParams())
    assert prepared.wire(8, None) is prepared.wire(8, None)
    assert prepared.wire(8, None) is not prepared.wire(8, 1)


def test_a_nul_that_is_written_out() -> None:
    SamplingParams(regex=r"a\x00")
    SamplingParams(json_schema={"type": "string", "pattern": r"\u0000"})
    SamplingParams(json_schema={"const": "\0"})


def test_what_was_asked_before_is_told_from_what_looks_like_it() -> None:
    """A call with the same objects as the previous one is not checked again. All others are."""
    cache = SamplingCache(100)
    first = cache.prepare(None, {"max_new_tokens": 1, "min_new_tokens": 0})
    assert cache.prepare(None, {"max_new_tokens": 1, "min_new_tokens": 0}) is first
    with pytest.raises(InvalidRequest, match="max_new_tokens must be an integer, got True"):
        cache.prepare(None, {"max_new_tokens": True, "min_new_tokens": 0})
    swapped = cache.prepare(None, {"min_new_tokens": 0, "max_new_tokens": 1})
    assert swapped.params == first.params
    assert cache.prepare(None, {"max_new_tokens": 1}).params.min_new_tokens == 0
    assert cache.prepare(None, {}).params == SamplingParams()
    assert cache.prepare(None, {}).params == SamplingParams()
    stops = ["a"]
    assert cache.prepare(None, {"stop": stops}).params.stop_strings == ("a",)
    stops.append("b")
    assert cache.prepare(None, {"stop": stops}).params.stop_strings == ("a", "b")


class Knob:
    """A number that changes, like a tensor."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


def test_what_can_change_is_read_by_each_call() -> None:
    cache = SamplingCache(100)
    knob = Knob(1.0)
    params = SamplingParams(temperature=knob)  # type: ignore[arg-type]
    for value in (1.0, 0.25):
        knob.value = value
        for prepared in (
            cache.prepare(None, {"temperature": knob}),
            cache.prepare(params, {}),
        ):
            raw = prepared.wire(5, None)
            assert msgspec.msgpack.decode(raw, type=SentSampling).temperature == value


def test_a_bias_against_a_token_may_be_of_any_size() -> None:
    wire = SamplingParams(logit_bias={1: -1e39, 2: -math.inf}).to_wire(5, None)
    assert wire["logit_bias"] == {1: -MAX_BIAS, 2: -MAX_BIAS}


def test_token_ids_among_stop_strings() -> None:
    for wrong in ([5], ["a", 5], (5,), 5):
        says = rf"stop must be .*got {re.escape(repr(wrong))}; for token ids use stop_token_ids"
        with pytest.raises(InvalidRequest, match=says):
            SamplingParams(stop=wrong)  # type: ignore[arg-type]


def test_temperatures_that_sglang_would_change() -> None:
    """SGLang would sample greedily, with the logprobs of temperature 1."""
    for value in (1e-7, np.float32(9e-7), 5e-324):
        with pytest.raises(InvalidRequest, match=r"temperature must be 0.*or at least 1e-06, got"):
            SamplingParams(temperature=value)
    for value in (0, 0.0, -0.0, 1e-6, 2e-6):
        assert SamplingParams(temperature=value).to_wire(1, None)["temperature"] == value
