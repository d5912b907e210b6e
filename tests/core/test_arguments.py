"""Arguments of an endpoint: bound by name, type-checked, with arrays and bytes as frames."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sglrl.errors import UsageError
from sglrl.wire.codec import Arguments, Result


@dataclasses.dataclass
class Step:
    name: str
    reward: float
    mask: NDArray[np.bool_]


class Episode(msgspec.Struct):
    steps: list[Step]
    extra: dict[str, NDArray[np.float32]]


def arguments_of(function: Callable[..., Any]) -> Arguments:
    return Arguments(function.__name__, inspect.signature(function), get_type_hints(function))


def there(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments that the endpoint gets after encoding and decoding."""
    arguments = arguments_of(function)
    body, frames = arguments.encode(args, kwargs)
    return arguments.decode(bytes(body), [bytes(frame) for frame in frames])


def plain(a: int, b: float = 2.5, *, c: str = "c", d: list[int] | None = None) -> None: ...
def raw(data: bytes, more: bytes = b"more", n: int = 0) -> None: ...
def floats(x: NDArray[np.float32]) -> None: ...
def any_array(x: np.ndarray) -> None: ...  # type: ignore[type-arg]
def maybe(x: NDArray[np.int64] | None = None) -> None: ...
def untyped(x) -> None: ...  # type: ignore[no-untyped-def]
def episode(e: Episode) -> None: ...
def nested(x: dict[str, list[NDArray[np.int32]]]) -> None: ...
def nothing() -> None: ...


def test_plain_values_and_defaults() -> None:
    assert there(plain, 1) == {"a": 1, "b": 2.5, "c": "c", "d": None}
    assert there(plain, 1, 3, c="x", d=[1]) == {"a": 1, "b": 3.0, "c": "x", "d": [1]}
    assert there(plain, np.int32(7), np.float32(0.5)) == {"a": 7, "b": 0.5, "c": "c", "d": None}
    assert there(nothing) == {}


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((), {}, r"plain\(\): missing a required argument: 'a'"),
        ((1, 2.0, 3), {}, "too many positional arguments"),
        ((1,), {"z": 1}, "unexpected keyword argument 'z'"),
        ((1,), {"a": 1}, "multiple values for argument 'a'"),
        (("one",), {}, "Expected `int`, got `str` in argument `a`"),
        ((1, "x"), {}, "Expected `float`, got `str` in argument `b`"),
        ((1,), {"d": [1, "x"]}, r"Expected `int`, got `str` in argument `d\[1\]`"),
        ((True,), {}, "Expected `int`, got `bool` in argument `a`"),
        ((1 << 64,), {}, "plain"),
        ((1,), {"c": "\ud800"}, "surrogates not allowed"),
        ((object(),), {}, "builtins.object cannot be sent"),
        (([np.zeros(3)],), {}, "Expected `int`, got `array` in argument `a`"),
        ((np.zeros(3),), {}, "Expected `int`, got `ext` in argument `a`"),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        there(plain, *args, **kwargs)


def test_what_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="contains itself"):
        there(untyped, loop)


class NotSendable: ...


@dataclasses.dataclass
class Chain:
    """Contains itself, and a type that cannot be sent."""

    rest: Chain | None
    last: NotSendable | None


@pytest.mark.parametrize(
    ("type_", "named"),
    [
        (NotSendable, "NotSendable"),
        (dict[str, list[NotSendable | None]], "NotSendable"),
        (tuple[int, NotSendable], "NotSendable"),
        (Chain, "NotSendable"),
        (object, "builtins.object"),
        (np.float32, "numpy.float32"),
        (Callable[[], int], "Callable"),
    ],
)
def test_types_that_cannot_be_sent(type_: Any, named: str) -> None:
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = type_
    with pytest.raises(UsageError, match=rf"function\(\): argument 'x' .*{named}, which cannot be"):
        arguments_of(function)


@given(data=st.binary(), n=st.integers(0, 9))
def test_bytes_travel_as_frames(data: bytes, n: int) -> None:
    body, frames = arguments_of(raw).encode((data,), {"n": n})
    assert [bytes(f) for f in frames] == [data, b"more"]
    assert len(body) < 10
    assert there(raw, data, n=n) == {"data": data, "more": b"more", "n": n}
    assert there(raw, memoryview(data))["data"] == data
    assert there(raw, bytearray(data))["data"] == data


@pytest.mark.parametrize(
    "view", [memoryview(b"abcdef")[::2], np.arange(3.0).data, np.ones((2, 3))[:, ::2].data]
)
def test_views_leave_as_bytes_in_one_piece(view: memoryview) -> None:
    argument, _ = arguments_of(raw).encode((view,), {})[1]
    (result,) = Result(bytes).encode(view)[1]
    for frame in (argument, result):
        assert memoryview(frame).contiguous
        assert len(frame) == view.nbytes
        assert bytes(frame) == view.tobytes()


@pytest.mark.parametrize("value", ["text", 3, None, [b"x"]])
def test_bytes_wanted(value: object) -> None:
    with pytest.raises(UsageError, match="argument 'data': expected bytes, got"):
        there(raw, value)


arrays = st.builds(
    lambda dtype, shape, order: (
        np.arange(int(np.prod(shape))).astype(dtype).reshape(shape, order=order)
    ),
    dtype=st.sampled_from(
        ["f4", "f8", ">f4", "i1", "u8", "?", "c8", "M8[s]", "m8[ms]", "U3", "S2"]
    ),
    shape=st.lists(st.integers(0, 3), max_size=3),
    order=st.sampled_from("CF"),
)


@given(array=arrays)
def test_arrays_keep_dtype_and_shape(array: np.ndarray[Any, Any]) -> None:
    for function in (any_array, untyped):
        again = there(function, array)["x"]
        assert again.dtype == array.dtype
        assert again.shape == array.shape
        np.testing.assert_array_equal(again, array)
        assert not again.flags.writeable


def test_arrays_are_not_copied_on_the_way_out_nor_in() -> None:
    array = np.arange(1000, dtype=np.float32)
    arguments = arguments_of(floats)
    body, frames = arguments.encode((array,), {})
    assert len(body) < 40
    assert np.shares_memory(np.frombuffer(frames[0], np.uint8), array)
    assert np.shares_memory(arguments.decode(body, frames)["x"], array)


def test_views_are_sent_as_what_they_show() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::-1]
    np.testing.assert_array_equal(there(floats, array)["x"], array)


def test_dtype_of_the_annotation_is_enforced() -> None:
    with pytest.raises(UsageError, match="expected an array of float32, got float64 in argument"):
        there(floats, np.zeros(3))
    with pytest.raises(UsageError, match="expected a numpy array, got list"):
        there(floats, [1.0])
    with pytest.raises(UsageError, match="expected an array of int64"):
        there(maybe, np.zeros(3, np.int32))
    assert there(maybe)["x"] is None


@pytest.mark.parametrize(
    "array",
    [np.array([object()]), np.zeros(2, dtype=[("a", "f4"), ("b", "i4")])],
    ids=["objects", "records"],
)
def test_arrays_that_cannot_be_sent(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        there(any_array, array)


def test_dataclasses_and_structs_with_arrays_inside() -> None:
    mask = np.array([True, False])
    value = Episode(
        [Step("first", 1.0, mask), Step("second", 2.0, ~mask)],
        {"values": np.array([[0.5]], np.float32)},
    )
    again = there(episode, value)["e"]
    assert isinstance(again, Episode)
    assert [s.name for s in again.steps] == ["first", "second"]
    np.testing.assert_array_equal(again.steps[1].mask, ~mask)
    np.testing.assert_array_equal(again.extra["values"], value.extra["values"])
    with pytest.raises(UsageError, match="expected an array of bool"):
        there(episode, Episode([Step("x", 1.0, np.zeros(2))], {}))


def test_nested_arrays() -> None:
    value = {"a": [np.arange(n, dtype=np.int32) for n in range(4)], "b": []}
    again = there(nested, value)["x"]
    assert [x.tolist() for x in again["a"]] == [[], [0], [0, 1], [0, 1, 2]]
    assert again["b"] == []


def test_variadic_endpoints_are_refused() -> None:
    def many(*values: int) -> None: ...
    def named(**values: int) -> None: ...

    for function in (many, named):
        with pytest.raises(UsageError, match=r"takes \*values; endpoints name their arguments"):
            arguments_of(function)


@given(body=st.binary(max_size=40), frames=st.lists(st.binary(max_size=8), max_size=2))
def test_hostile_bodies(body: bytes, frames: list[bytes]) -> None:
    for function in (plain, raw, floats, untyped, episode):
        try:
            arguments_of(function).decode(body, frames)
        except msgspec.ValidationError:
            continue


header = st.tuples(
    st.integers(-2, 3),
    st.sampled_from(["<f4", "O", "(", "f4,,", "{", "S0", "V", "2f4", "<U3", "", "\0"]) | st.text(),
    st.lists(st.integers(-3, 1 << 62) | st.integers(0, 4), max_size=3),
)


@given(header=header, frame=st.binary(max_size=16), code=st.integers(0, 2))
def test_hostile_arrays(header: tuple[int, str, list[int]], frame: bytes, code: int) -> None:
    """An array header that does not match its frame, dtype or shape is refused."""
    try:
        data = msgspec.msgpack.encode(header)
    except UnicodeEncodeError:
        return
    body = msgspec.msgpack.encode([msgspec.msgpack.Ext(code, data)])
    for function in (any_array, untyped):
        try:
            array = arguments_of(function).decode(body, [frame])["x"]
        except msgspec.ValidationError:
            continue
        assert array.nbytes == len(frame)
        assert array.shape == tuple(header[2])
