"""Routed experts in completions, trajectories and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sglrl.errors import InvalidRequest, ProtocolError, UsageError
from sglrl.inference.completion import Completion
from sglrl.inference.routed_experts import RoutedRows, check_begin
from sglrl.inference.sampling import SamplingParams
from sglrl.sessions.arrays import joined_rows, routed_stop
from sglrl.sessions.record import Record, RoutedRecord
from sglrl.sessions.trajectory import Trajectory, record_of
from sglrl.sessions.trajectory_files import load, save, to_jsonl
from sglrl.wire.engine import GenerateArgs, RoutedShape, TokenChunk

from .byte_decoder import decode_bytes
from .test_trajectory import i4, make

SHAPE = RoutedShape(2, 3, "<i2")
ROWS = np.arange(7 * 2 * 3, dtype="<i2").reshape(7, 2, 3)
"""For the tokens 1, 2, ... 8 of ``make``, of which the last one has no row."""


def received(*parts: Any, start: int = 0) -> RoutedRows:
    made = RoutedRows(SHAPE, start)
    for part in parts:
        made.add(TokenChunk(b"", routed=len(part)), [part.tobytes()] if len(part) else [])
    return made


def completion(rows: RoutedRows | None) -> Completion:
    values = 0, 0, i4([1]), [TokenChunk(i4([2]))], True, 0, 1.0, 1.0, 2.0, 3.0, decode_bytes
    return Completion(*values, SamplingParams(), routed_rows=rows)


def test_a_completion_joins_the_rows_of_its_chunks() -> None:
    for parts in ([ROWS], [ROWS[:2], ROWS[2:2], ROWS[2:]]):
        made = completion(received(*parts, start=5))
        assert made.routed_from == 5
        assert made.routed_experts is not None
        assert made.routed_experts.dtype == np.int16
        assert not made.routed_experts.flags.writeable
        np.testing.assert_array_equal(made.routed_experts, ROWS)
    nothing = completion(received()).routed_experts
    assert nothing is not None
    assert nothing.shape == (0, 2, 3)
    assert completion(None).routed_experts is None


def test_a_copy_grows_alone() -> None:
    one = received(ROWS[:3], start=1)
    other = one.copy()
    other.add(TokenChunk(b"", routed=1), [ROWS[3:4].tobytes()])
    assert (one.stop, other.stop) == (4, 5)
    np.testing.assert_array_equal(one.array(), ROWS[:3])


@pytest.mark.parametrize(
    ("routed", "frames"),
    [(2, [ROWS[:1]]), (0, [ROWS[:1]]), (1, []), (-1, [ROWS[:1]]), (1, [ROWS.ravel()[:3]] * 2)],
)
def test_frames_of_another_size(routed: int, frames: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="in frames of another size"):
        received().add(TokenChunk(b"", routed=routed), [one.tobytes() for one in frames])


def test_a_finished_call_has_all_rows() -> None:
    received(ROWS).check_end(8, 2)
    received(ROWS[:2], start=5).check_end(8, 2)
    received(ROWS[:2]).check_end(8, 0)
    for tokens, sampled in ((9, 2), (7, 2), (7, 0)):
        with pytest.raises(ProtocolError, match="up to position 7"):
            received(ROWS).check_end(tokens, sampled)


@pytest.mark.parametrize(("begin", "rows"), [(-1, 2), (0, -1), (5, 0), (2, 3), (1 << 60, 0)])
def test_rows_begin_within_the_tokens(begin: int, rows: int) -> None:
    def args(begin: int, rows: int) -> GenerateArgs:
        raw = msgspec.Raw(b"")
        return GenerateArgs(
            i4([1, 2, 3]), raw, resume=i4([4, 5]), routed_from=begin, resume_rows=rows
        )

    check_begin(args(2, 2))
    with pytest.raises(InvalidRequest, match=f"begin at position {begin}"):
        check_begin(args(begin, rows))


def test_turns_join_their_rows() -> None:
    first, second = completion(received(ROWS[:3])), completion(received(ROWS[3:], start=3))
    without = completion(None)
    # This turn has all rows once more.
    again = completion(received(ROWS + 100))
    for path, stop in (
        ([first, second], 7),
        ([first, without, second], 7),
        ([without, first], 3),
        ([first, again], 7),
    ):
        joined = joined_rows(path)
        assert joined is not None
        assert not joined.flags.writeable
        assert len(joined) == routed_stop(path) == stop
        # The first row of a position stays.
        np.testing.assert_array_equal(joined[:3], ROWS[:3])
    assert joined_rows([without]) is None
    assert routed_stop([without]) == 0


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (ROWS.tolist(), "must be an array"),
        (ROWS.astype(np.int32), "of uint8 or int16"),
        (ROWS[0], r"\[n, layers, k\]"),
        (np.zeros((9, 2, 3), np.uint8), "9 rows of 8 tokens"),
        (ROWS - 1, "negative"),
    ],
)
def test_rows_that_do_not_fit(rows: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(routed_experts=rows)


def test_rows_are_saved(tmp_path: Path) -> None:
    small = ROWS.astype(np.uint8)
    given = [make(routed_experts=ROWS, branches=(make(routed_experts=small),)), make()]
    assert not given[0].routed_experts.flags.writeable  # type: ignore[union-attr]
    save(tmp_path / "file", given)
    one, other = load(tmp_path / "file")
    assert other.routed_experts is None
    for found, expected in ((one, ROWS), (one.branches[0], small)):
        assert found.routed_experts is not None
        assert found.routed_experts.dtype == expected.dtype
        np.testing.assert_array_equal(found.routed_experts, expected)
    to_jsonl(tmp_path / "lines", given)
    first, _ = (tmp_path / "lines").read_text().splitlines()
    assert "routed_experts" not in json.loads(first)


def test_a_record_of_another_process() -> None:
    data = msgspec.msgpack.encode(record_of(make(routed_experts=ROWS)))
    record = msgspec.msgpack.decode(data, type=Record)
    np.testing.assert_array_equal(Trajectory.from_record(record).routed_experts, ROWS)
    for wrong in (
        RoutedRecord(SHAPE, b"\0"),
        RoutedRecord(RoutedShape(2, 3, "<f4"), bytes(24)),
        RoutedRecord(RoutedShape(2, 0, "<i2"), bytes(24)),
        RoutedRecord(SHAPE, bytes(12 * 9)),
    ):
        with pytest.raises(ProtocolError):
            Trajectory.from_record(msgspec.structs.replace(record, routed=wrong))
