"""A completion is made from chunks: arrays, spans, timing, and text on request."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.inference.chunk import Chunk
from sglrl.inference.completion import Completion, VersionSpan, version_spans
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.tokens import TokenizerBox
from sglrl.wire.engine import TokenChunk

from .byte_decoder import decode_bytes


def i4(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def f4(values: Sequence[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def complete(chunks: Sequence[TokenChunk], **changes: Any) -> Completion:
    settings: dict[str, Any] = {
        "worker": 2,
        "resumed": 0,
        "prompt": i4([1, 2, 3]),
        "chunks": chunks,
        "wants_logprobs": True,
        "top_logprobs": 0,
        "submitted": 10.0,
        "sent": 10.5,
        "first": 11.0,
        "finished": 12.0,
        "decode": decode_bytes,
        "params": SamplingParams(),
    }
    return Completion(*(settings | changes).values())


CHUNKS = (
    TokenChunk(i4([104]), f4([-0.5]), version=1),
    TokenChunk(i4([105, 33]), f4([-1.0, -2.0]), "stop", 2, version=2, stop_match=33),
)


def test_arrays_join_the_chunks() -> None:
    completion = complete(CHUNKS)
    assert completion.prompt_ids.dtype == completion.output_ids.dtype == np.int32
    assert completion.prompt_ids.tolist() == [1, 2, 3]
    assert completion.output_ids.tolist() == [104, 105, 33]
    assert completion.logprobs is not None
    assert completion.logprobs.dtype == np.float32
    assert completion.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert completion.versions == (VersionSpan(0, 1, 1), VersionSpan(1, 3, 2))
    assert completion.finish_reason == "stop"
    assert completion.stop_match == 33
    assert completion.cached_tokens == 2
    assert completion.text == "hi"


def test_it_is_immutable() -> None:
    completion = complete(CHUNKS)
    for array in (completion.prompt_ids, completion.output_ids, completion.logprobs):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(AttributeError):
        completion.worker = 3  # type: ignore[misc]


def test_each_part_is_worked_out_once() -> None:
    calls = []

    def decode(ids: Sequence[int], skip: bool) -> str:
        calls.append(tuple(ids))
        return decode_bytes(ids, skip)

    completion = complete(CHUNKS, decode=decode)
    assert completion.text == completion.text == "hi"
    assert calls == [(104, 105)]
    assert completion.output_ids is completion.output_ids


def test_logprobs_only_when_asked_for() -> None:
    assert complete(CHUNKS, wants_logprobs=False).logprobs is None
    assert complete(CHUNKS).top_logprobs is None


def test_top_logprobs_are_two_dimensional() -> None:
    chunks = (
        TokenChunk(i4([1]), top_ids=i4([1, 2]), top_logprobs=f4([-0.1, -3.0])),
        TokenChunk(i4([2]), finish="length", top_ids=i4([2, 1]), top_logprobs=f4([-0.2, -2.0])),
    )
    top = complete(chunks, top_logprobs=2).top_logprobs
    assert top is not None
    assert top.ids.tolist() == [[1, 2], [2, 1]]
    assert top.ids.dtype == np.int32
    assert top.logprobs.shape == (2, 2)
    assert top.logprobs.dtype == np.float32


def test_timing() -> None:
    assert complete(CHUNKS).timing == (0.5, 1.0, 2.0)
    assert complete(CHUNKS, first=0.0).timing == (0.5, 2.0, 2.0), "all tokens in one message"


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [pickled, copy.deepcopy])
def test_it_can_be_sent_elsewhere(copied: Callable[[Any], Any]) -> None:
    completion = complete(CHUNKS, decode=TokenizerBox("a/model").decode)
    for _ in range(2):
        # The second copy includes the values computed for the comparisons.
        again = copied(completion)
        for name in ("prompt_ids", "output_ids", "logprobs"):
            np.testing.assert_array_equal(getattr(again, name), getattr(completion, name))
        assert (again.timing, again.versions) == (completion.timing, completion.versions)


def test_a_tokenizer_is_not_copied() -> None:
    box = TokenizerBox("a/model")
    assert copy.deepcopy([box])[0] is box


def test_repr_is_for_people() -> None:
    completion = complete(CHUNKS)
    assert repr(completion) == (
        f"<Completion {completion.text!r}, 3 prompt + 3 new tokens, finish_reason='stop', "
        "worker=2, cached=2, 2000.0 ms>"
    )
    assert "resumed=1" in repr(complete(CHUNKS, resumed=1))


@given(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2))))
def test_version_spans(parts: list[tuple[int, int]]) -> None:
    """Spans are in order and without gaps or overlaps. Neighbours differ. Tokens keep versions."""
    spans = version_spans([TokenChunk(i4([7] * n), version=v) for n, v in parts])
    by_token = [v for n, v in parts for _ in range(n)]
    assert [s.version for s in spans for _ in range(s.start, s.stop)] == by_token
    edges = [0, *(s.stop for s in spans)]
    assert [s.start for s in spans] == edges[:-1]
    assert edges[-1] == len(by_token)
    assert all(s.start < s.stop for s in spans)
    assert all(a.version != b.version for a, b in pairwise(spans))


def test_chunk() -> None:
    chunk = Chunk("length", 4, i4([1, 2]), f4([-1.0, -2.0]), lambda: "text")
    assert chunk.output_ids.tolist() == [1, 2]
    assert chunk.logprobs is not None
    assert chunk.logprobs.tolist() == [-1.0, -2.0]
    assert chunk.text == "text"
    assert repr(chunk) == "<Chunk 2 tokens, finish_reason='length'>"
    assert Chunk(None, 0, i4([1]), None, str).logprobs is None
