"""The result of an endpoint: typed on arrival, with bytes and arrays as frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglrl.errors import ProtocolError
from sglrl.wire.codec import Result


def back(hint: Any, value: Any, declared: Any = None) -> Any:
    body, frames = Result(hint if declared is None else declared).encode(value)
    return Result(hint).decode(bytes(body), [bytes(f) for f in frames])


@given(data=st.binary())
def test_bytes(data: bytes) -> None:
    body, frames = Result(bytes).encode(data)
    assert [bytes(f) for f in frames] == [data]
    assert len(body) == 1
    assert back(bytes, data) == data
    assert back(bytes, memoryview(data)) == data
    assert back(bytes | None, data) == data


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, 3),
        (None, None),
        (dict[str, list[float]], {"a": [1.0]}),
        (tuple[int, str], (1, "x")),
        (float, np.float32(0.5)),
    ],
)
def test_values(hint: Any, value: Any) -> None:
    assert back(hint, value) == value


def test_arrays_with_and_without_an_annotation() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    for hint in (NDArray[np.int16], np.ndarray, Any):
        again = back(hint, array)
        assert again.dtype == array.dtype
        np.testing.assert_array_equal(again, array)
    pair = back(Any, {"a": [array, 1]})
    np.testing.assert_array_equal(pair["a"][0], array)


@pytest.mark.parametrize(
    ("declared", "returned", "value"),
    [
        (int, str, "3"),
        (bytes, int, 3),
        (bytes, str, "x"),
        (NDArray[np.float32], np.ndarray, np.zeros(2)),
        (NDArray[np.float32], list[float], [1.0]),
        (int, np.ndarray, np.zeros(2)),
    ],
)
def test_something_else_than_declared(declared: Any, returned: Any, value: Any) -> None:
    with pytest.raises(ProtocolError, match="returned something else than it declares"):
        back(declared, value, returned)


def test_a_missing_frame() -> None:
    for hint, value in ((bytes, b"x"), (np.ndarray, np.zeros(2))):
        body, _ = Result(hint).encode(value)
        with pytest.raises(ProtocolError, match="raw frame 0 is missing"):
            Result(hint).decode(body, [])


def test_what_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        Result(Any).encode(object())


@given(body=st.binary(max_size=30), frames=st.lists(st.binary(max_size=8), max_size=2))
def test_hostile_bodies(body: bytes, frames: list[bytes]) -> None:
    for hint in (int, bytes, Any, NDArray[np.float32], dict[str, int]):
        try:
            Result(hint).decode(body, frames)
        except ProtocolError:
            continue
