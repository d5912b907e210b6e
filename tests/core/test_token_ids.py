"""Checked token ids become int32 bytes, or an error that names the fault."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.errors import InvalidRequest
from sglrl.inference.tokens import _check_list, check_ids, in_range

VOCAB = 1000
Check = Callable[[Any, int], bytes]


def slowly(ids: Any, vocab_size: int) -> bytes:
    """Check every list with the function that finds the fault in a wrong list."""
    if type(ids) in (list, tuple):
        return _check_list(ids, vocab_size)
    return check_ids(ids, vocab_size)


every_way = pytest.mark.parametrize("check_ids", [check_ids, slowly])


class Special(IntEnum):
    END = 7


@every_way
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_every_kind_of_sequence(check_ids: Check, ids: list[int]) -> None:
    wanted = np.array(ids, dtype="<i4").tobytes()
    array = np.array(ids)
    for given_ids in (
        ids,
        tuple(ids),
        list(array),
        *(array.astype(t) for t in ("i4", "i8", "u2", "u4", "u8", ">i4")),
        np.repeat(array, 2)[::2],
    ):
        assert check_ids(given_ids, VOCAB) == wanted


@every_way
def test_other_integers(check_ids: Check) -> None:
    assert check_ids([Special.END, np.uint8(3)], VOCAB) == np.array([7, 3], "<i4").tobytes()
    assert check_ids(range(3), VOCAB) == np.array([0, 1, 2], "<i4").tobytes()
    assert check_ids([0, 2**31 - 1], 2**31) == np.array([0, 2**31 - 1], "<i4").tobytes()


class Tensor:
    """The part of a torch tensor's interface that is used."""

    def __init__(self, values: Any) -> None:
        self.values = np.array(values)

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.values


def test_tensors() -> None:
    assert check_ids(Tensor([1, 2]), VOCAB) == np.array([1, 2], "<i4").tobytes()
    with pytest.raises(InvalidRequest, match="one-dimensional"):
        check_ids(Tensor([[1, 2]]), VOCAB)


def test_a_tensor_of_a_type_that_numpy_has_not() -> None:
    class Bfloat16(Tensor):
        def numpy(self) -> np.ndarray[Any, Any]:
            raise TypeError("Got unsupported ScalarType BFloat16")

    with pytest.raises(InvalidRequest, match=r"sequence of integers: .*BFloat16"):
        check_ids(Bfloat16([1, 2]), VOCAB)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "the prompt is empty"),
        ((), "the prompt is empty"),
        (np.array([], int), "the prompt is empty"),
        ([-1], r"token id -1 is outside the vocabulary \(0\.\.999\)"),
        ([5, 1000], "token id 1000 is outside"),
        ([5, 10**30], "is outside the vocabulary"),
        ([-(10**30)], "is outside the vocabulary"),
        (np.array([5, 1000]), "token id 1000 is outside"),
        (np.array([-1, 5]), "token id -1 is outside"),
        (np.array([2**64 - 1], np.uint64), "is outside the vocabulary"),
        ([True, 2], "must be integers, got bool, int"),
        ([np.True_], "must be integers, got bool"),
        ([1, 2.0], "must be integers, got float, int"),
        (["1"], "must be integers, got str"),
        ([[1, 2]], "must be integers, got list"),
        ([None], "must be integers, got NoneType"),
        (np.array([1.0]), "one-dimensional sequence of integers, got float64"),
        (np.array([True]), "one-dimensional sequence of integers, got bool"),
        (np.array([[1]]), r"of shape \(1, 1\)"),
        (np.array(5), r"of shape \(\)"),
        (5, "one-dimensional"),
        (None, "one-dimensional"),
        ({1, 2}, "one-dimensional"),
        (object(), "one-dimensional"),
        ("text", "encode text with client.tokenizer"),
        (b"text", "encode text with client.tokenizer"),
    ],
)
@every_way
def test_not_token_ids(check_ids: Check, ids: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        check_ids(ids, VOCAB)


@every_way
@given(
    ids=st.lists(
        st.integers(-3, VOCAB + 3) | st.booleans() | st.floats() | st.none() | st.text(max_size=1),
        max_size=6,
    )
)
def test_any_list(check_ids: Check, ids: list[Any]) -> None:
    good = bool(ids) and all(type(i) is int and 0 <= i < VOCAB for i in ids)
    if good:
        assert np.frombuffer(check_ids(ids, VOCAB), "<i4").tolist() == ids
    else:
        with pytest.raises(InvalidRequest):
            check_ids(ids, VOCAB)


@given(ids=st.lists(st.integers(-(2**31), 2**31 - 1)), vocab_size=st.integers(1, 2**31))
def test_whether_bytes_are_ids(ids: list[int], vocab_size: int) -> None:
    packed = np.array(ids, "<i4").tobytes()
    assert in_range(packed, vocab_size) is all(0 <= id_ < vocab_size for id_ in ids)
    assert not in_range(packed + b"x", vocab_size)
    inside = np.array(ids, "<i8") % vocab_size
    assert in_range(inside.astype("<i4").tobytes(), vocab_size)
