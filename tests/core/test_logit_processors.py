"""Names and parameters of logit processors are checked before anything is sent."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from sglrl.errors import InvalidRequest
from sglrl.inference.sampling import SamplingParams, SentSampling
from sglrl.inference.sampling_cache import SamplingCache

NAME = "my_package.processors:Penalty"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "name", ["", "Penalty", "a:", ":B", "a:B:C", "a b:C", "a.:B", "a:B.C", "__main__:C", 3, b"a:B"]
)
def test_names(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="as 'module:Class', got"):
        SamplingParams(logit_processor=name)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ([1], r"must be a dict of JSON values .*, got \[1\]"),
        ({"a": {3: 1}}, r"custom_params\['a'\] has the key 3; keys must be text"),
        ({1: 1}, r"custom_params has the key 1"),
        ({"a": [0, {"b": b"x"}]}, r"custom_params\['a'\]\[1\]\['b'\] is b'x'"),
        ({"a": np.float32(1)}, r"custom_params\['a'\] is .*1\.0.*must be a dict of JSON"),
        ({"a": np.zeros(2)}, r"custom_params\['a'\] is array"),
        ({"a": {1, 2}}, r"custom_params\['a'\] is \{1, 2\}"),
        ({"a": 1 << 64}, r"custom_params\['a'\] is 18446744073709551616"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"\ud800": 1}, "lone surrogate"),
        ({"a": nested(40)}, r"\[0\] is nested more than 32 times"),
        ({"__req__": 1}, "has '__req__', which SGLang sets itself"),
    ],
)
def test_parameters_that_cannot_be_sent(params: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        SamplingParams(logit_processor=NAME, custom_params=params)


def test_parameters_need_a_processor() -> None:
    with pytest.raises(InvalidRequest, match="custom_params needs logit_processor"):
        SamplingParams(custom_params={"a": 1})
    SamplingParams(custom_params={})


def test_values_that_are_sent() -> None:
    params: dict[str, Any] = {"a": [None, True, -(1 << 63), (1.5, "x")], "b": {"c": {}}}
    for given in (params, MappingProxyType(params), OrderedDict(params)):
        checked = SamplingParams(logit_processor=NAME, custom_params=given)
        raw = SamplingCache(9, processors=(NAME,)).prepare(checked, {}).wire(3, None)
        sent = msgspec.msgpack.decode(raw, type=SentSampling)
        assert sent.logit_processor == NAME
        assert sent.custom_params == {**params, "a": [None, True, -(1 << 63), [1.5, "x"]]}
    assert {"logit_processor", "custom_params"}.isdisjoint(SamplingParams().to_wire(3, None))


def test_a_processor_must_be_declared() -> None:
    with pytest.raises(InvalidRequest, match=r"no logit processor 'a:B'; .*Declared: none"):
        SamplingCache(9).prepare(None, {"logit_processor": "a:B"})
    cache = SamplingCache(9, processors=(NAME, "c:D"))
    with pytest.raises(InvalidRequest, match=rf"Declared: {NAME}, c:D"):
        cache.prepare(None, {"logit_processor": "a:B"})
    assert cache.prepare(None, {"logit_processor": NAME}).params.logit_processor == NAME
