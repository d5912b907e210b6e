"""Sampling masks in completions, trajectories and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sglrl.errors import ProtocolError, UsageError
from sglrl.inference.completion import Completion
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.sampling_mask import SamplingMask, is_whole
from sglrl.sessions.record import Record
from sglrl.sessions.trajectory import Trajectory, record_of
from sglrl.sessions.trajectory_files import load, save, to_jsonl
from sglrl.wire.engine import TokenChunk

from .byte_decoder import decode_bytes
from .test_trajectory import f4, i4, make

MASK = SamplingMask(np.array([4, 5, 5, 7, 8, 9], np.int32), np.array([0, 2, 3, 3, 5, 6]))
"""For the response 4, 5, 6, 7, 8 of ``make``, whose third token is an observation."""


encode = msgspec.msgpack.encode
decode = msgspec.msgpack.Decoder(Record).decode


def completion(chunks: list[TokenChunk], *, masked: bool = True) -> Completion:
    params = SamplingParams(top_p=0.5, return_sampling_mask=masked)
    return Completion(0, 0, i4([1]), chunks, True, 0, 1.0, 1.0, 2.0, 3.0, decode_bytes, params)


CHUNKS = [
    TokenChunk(i4([4, 5]), f4([0, 0]), mask_ids=i4([3, 4, 5]), mask_lengths=i4([2, 1])),
    TokenChunk(i4([6]), f4([0]), "stop", mask_ids=i4([5, 6, 7]), mask_lengths=i4([3])),
]


def test_a_completion_joins_the_masks_of_its_chunks() -> None:
    mask = completion(CHUNKS).sampling_mask
    assert mask is not None
    assert (mask.ids.dtype, mask.offsets.dtype) == (np.int32, np.int64)
    assert mask.ids.tolist() == [3, 4, 5, 5, 6, 7]
    assert mask.offsets.tolist() == [0, 2, 3, 6]
    assert mask.lengths.tolist() == [2, 1, 3]
    assert [ids.tolist() for ids in mask.sets()] == [[3, 4], [5], [5, 6, 7]]
    assert not mask.offsets.flags.writeable
    assert repr(mask) == "<SamplingMask of 3 tokens, 6 ids>"
    assert completion(CHUNKS, masked=False).sampling_mask is None
    nothing = completion([TokenChunk(b"", finish="abort")]).sampling_mask
    assert nothing is not None
    assert nothing.sets() == []


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([1, 2], []),
        ([1, 2], [2]),
        ([1, 2], [1, 1, 1]),
        ([1, 2], [2, 1]),
        ([1, 2], [2, 0]),
        ([1, 2], [3, -1]),
        ([], []),
    ],
)
def test_a_chunk_needs_a_set_for_each_token(ids: list[int], lengths: list[int]) -> None:
    chunk = TokenChunk(i4([4, 5]), mask_ids=i4(ids), mask_lengths=i4(lengths))
    assert not is_whole(chunk)
    assert not is_whole(TokenChunk(i4([4]), mask_ids=b"\0\0\0", mask_lengths=i4([1])))
    assert all(map(is_whole, [*CHUNKS, TokenChunk(b"")]))


def test_turns_join_their_masks() -> None:
    plain = [TokenChunk(i4([9]), f4([0]), "stop")]
    made = Trajectory.from_turns(
        i4([1]),
        i4([4, 5, 6, 20, 9, 21]),
        [0, 4],
        [completion(CHUNKS), completion(plain, masked=False)],
        [(0.0, ()), (0.0, ())],
        total=1.0,
        generating=1.0,
        metadata={},
    )
    mask = made.sampling_mask
    assert mask is not None
    assert [ids.tolist() for ids in mask.sets()] == [[3, 4], [5], [5, 6, 7], [], [], []]
    # ``from_turns`` skips the checks: its mask must pass them.
    assert made.replace().sampling_mask is not None
    assert not mask.ids.flags.writeable
    without = Trajectory.from_turns(
        i4([1]),
        i4([9]),
        [0],
        [completion(plain, masked=False)],
        [(0.0, ())],
        total=1.0,
        generating=1.0,
        metadata={},
    )
    assert without.sampling_mask is None


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (MASK._replace(offsets=np.array([0, 2, 3, 3, 6])), "must have 6 values"),
        (MASK._replace(offsets=np.array([0, 2, 3, 3, 5, 7])), "ascend from 0 to 6"),
        (MASK._replace(offsets=np.array([1, 2, 3, 3, 5, 6])), "ascend from 0"),
        (MASK._replace(offsets=np.array([0, 3, 2, 2, 5, 6])), "ascend from 0"),
        (MASK._replace(offsets=np.array([0, 1, 2, 3, 5, 6])), "empty where loss_mask is False"),
        (MASK._replace(ids=np.array([4, 5, 6, 7, 8, 8])), "lacks a sampled token"),
        (MASK._replace(ids=np.array([4.5, 5, 5, 7, 8, 8])), "must be int32"),
        ([1, 2, 3], "must be a SamplingMask"),
        (7, "must be a SamplingMask"),
    ],
)
def test_masks_that_do_not_fit_the_response(mask: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(sampling_mask=mask)


def test_a_mask_is_saved(tmp_path: Path) -> None:
    mask = MASK._replace(ids=np.array([4, 5, 5, 7, 8, 8]))
    given = [make(sampling_mask=mask, branches=(make(sampling_mask=mask),)), make()]
    save(tmp_path / "file", given)
    one, other = load(tmp_path / "file")
    assert other.sampling_mask is None
    for found in (one.sampling_mask, one.branches[0].sampling_mask):
        assert found is not None
        assert found.ids.tolist() == mask.ids.tolist()
        assert found.offsets.tolist() == mask.offsets.tolist()
    to_jsonl(tmp_path / "lines", given)
    first, second = (tmp_path / "lines").read_text().splitlines()
    assert json.loads(first)["sampling_mask"] == [[4, 5], [5], [], [7, 8], [8]]
    assert json.loads(second)["sampling_mask"] is None


def test_a_record_of_another_process() -> None:
    mask = MASK._replace(ids=np.array([4, 5, 5, 7, 8, 8]))
    record = decode(encode(record_of(make(sampling_mask=mask))))
    found = Trajectory.from_record(record).sampling_mask
    assert found is not None
    assert [part.tolist() for part in found] == [part.tolist() for part in mask]
    plain = decode(encode(record_of(make())))
    assert Trajectory.from_record(plain).sampling_mask is None
    for wrong in ({"mask_lengths": i4([2, 1])}, {"mask_ids": i4([1])}):
        fields = {name: getattr(record, name) for name in Record.__struct_fields__}
        with pytest.raises(ProtocolError):
            Trajectory.from_record(Record(**{**fields, **wrong}))
