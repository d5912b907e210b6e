"""Trajectories: refused values, the turns of a session as a trajectory, and files."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sglrl.errors import UsageError
from sglrl.inference.completion import Completion
from sglrl.inference.sampling import SamplingParams
from sglrl.sessions import trajectory_files
from sglrl.sessions.rewards import Reward
from sglrl.sessions.trajectory import Trajectory
from sglrl.sessions.trajectory_files import iter_load, load, save
from sglrl.sessions.turn import TrajectoryTiming, Turn
from sglrl.wire.engine import TokenChunk

from .byte_decoder import decode_bytes
from .trajectories import trajectories

ARRAYS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
DTYPES = ("int32", "int32", "bool", "float32", "int32")


def i4(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def f4(values: Sequence[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def make(**changes: Any) -> Trajectory:
    """Return a trajectory: two sampled tokens, an observation, two more sampled tokens."""
    values: dict[str, Any] = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5, 6, 7, 8],
        "loss_mask": [True, True, False, True, True],
        "logprobs": [-0.5, -1.0, 0.0, -1.5, -2.0],
        "versions": [3, 4, -1, 4, 5],
        "turns": (
            Turn(start=0, stop=2, reward=0.25, finish_reason="length"),
            Turn(start=3, stop=5, reward=0.5),
        ),
        "metadata": {"group": 7},
    }
    return Trajectory(**{**values, **changes})


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.turns == other.turns
    assert one.timing == other.timing
    assert one.metadata == other.metadata


# --- values ---------------------------------------------------------------------------------------


def test_it_holds_what_it_was_given() -> None:
    trajectory = make()
    assert trajectory.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trajectory.input_ids.dtype == np.int32
    assert trajectory.rewards.tolist() == [0.25, 0.5]
    assert trajectory.rewards.dtype == np.float32
    assert trajectory.reward == 0.75
    assert (trajectory.oldest_version, trajectory.newest_version) == (3, 5)
    assert trajectory.finish_reason == "stop"


def test_one_without_turns() -> None:
    trajectory = make(
        response_ids=[], loss_mask=[], logprobs=[], versions=[], turns=(), metadata={}
    )
    assert trajectory.input_ids.tolist() == [1, 2, 3]
    assert trajectory.rewards.shape == (0,)
    assert trajectory.reward == 0.0
    assert (trajectory.oldest_version, trajectory.newest_version) == (-1, -1)
    assert trajectory.finish_reason == ""
    assert trajectory.timing == (0.0, 0.0, 0.0)


@settings(deadline=None)
@given(trajectories())
def test_arrays_have_their_dtype_and_cannot_be_written_to(trajectory: Trajectory) -> None:
    for name, dtype in zip(ARRAYS, DTYPES, strict=True):
        assert getattr(trajectory, name).dtype == dtype, name
        assert not getattr(trajectory, name).flags.writeable, name
    assert not trajectory.input_ids.flags.writeable


@settings(deadline=None)
@given(trajectories())
def test_what_is_derived(trajectory: Trajectory) -> None:
    ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    sampled = [
        version
        for version, kept in zip(trajectory.versions, trajectory.loss_mask, strict=True)
        if kept
    ]
    assert trajectory.input_ids.tolist() == ids
    assert trajectory.oldest_version == min(sampled, default=-1)
    assert trajectory.newest_version == max(sampled, default=-1)
    assert trajectory.reward == sum(turn.reward for turn in trajectory.turns)


def test_an_array_that_its_owner_goes_on_writing_to_is_copied() -> None:
    ids = np.array([4, 5, 6, 7, 8], np.int32)
    trajectory = make(response_ids=ids)
    ids[0] = 99
    assert trajectory.response_ids[0] == 4
    assert ids.flags.writeable


def test_an_array_that_nobody_can_write_to_is_kept() -> None:
    ids = np.frombuffer(i4([4, 5, 6, 7, 8]), "<i4")
    assert make(response_ids=ids).response_ids is ids


def test_a_changed_copy_is_checked_too() -> None:
    trajectory = make().replace(metadata={"group": 8})
    assert trajectory.metadata == {"group": 8}
    with pytest.raises(UsageError, match="versions has 4 positions, response_ids 5"):
        make().replace(versions=np.zeros(4, np.int32))


# --- refused values -------------------------------------------------------------------------------

TURN = Turn(start=0, stop=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"prompt_ids": [[1, 2]]}, "prompt_ids must have one dimension, not 2"),
        ({"prompt_ids": 3}, "prompt_ids must have one dimension, not 0"),
        ({"prompt_ids": [1.0, 2.0]}, "prompt_ids must be int32, not float64"),
        ({"prompt_ids": ["a"]}, "prompt_ids must be int32, not str"),
        ({"prompt_ids": [True]}, "prompt_ids must be int32, not bool"),
        ({"prompt_ids": [2**31]}, "prompt_ids holds a value that does not fit into int32"),
        ({"prompt_ids": [1, -2]}, "prompt_ids holds a negative token id"),
        ({"prompt_ids": [[1], [2, 3]]}, "prompt_ids is not an array"),
        ({"response_ids": [4, 5, -6, 7, 8]}, "response_ids holds a negative token id"),
        ({"response_ids": [4, 5]}, "loss_mask has 5 positions, response_ids 2"),
        ({"loss_mask": [True] * 4}, "loss_mask has 4 positions, response_ids 5"),
        ({"loss_mask": [0, 1, 0, 2, 0]}, "loss_mask holds a value that does not fit into bool"),
        ({"loss_mask": [0.5] * 5}, "loss_mask must be bool, not float64"),
        ({"logprobs": [0.0]}, "logprobs has 1 positions, response_ids 5"),
        ({"logprobs": [-1.0] * 5}, "logprobs must be 0 where loss_mask is False"),
        ({"logprobs": [-1, -1, np.nan, -1, -1]}, "logprobs must be 0 where loss_mask is False"),
        ({"logprobs": ["x"] * 5}, "logprobs must be float32, not str"),
        ({"versions": [0] * 6}, "versions has 6 positions, response_ids 5"),
        ({"versions": [3, 4, 4, 4, 4]}, "versions must be >= 0 where loss_mask is True, -1 where"),
        ({"versions": [3, -1, -1, 4, 4]}, "versions must be >= 0 where loss_mask is True, -1 whe"),
        ({"loss_mask": [1] * 5, "versions": [3] * 5}, "loss_mask is True at 2, which is in none"),
        ({"turns": ()}, "loss_mask is True at 0, which is in none of the turns"),
        ({"turns": (TURN, TURN)}, r"turns\[1\] is 0 to 5, which is not within 5 to 5"),
        ({"turns": (Turn(start=3, stop=6),)}, r"turns\[0\] is 3 to 6, which is not within 0 to 5"),
        ({"turns": (Turn(start=3, stop=2),)}, r"turns\[0\] is 3 to 2, which is not within 0 to 5"),
        ({"turns": (Turn(start=-1, stop=5),)}, r"turns\[0\] is -1 to 5, which is not within 0 to"),
        ({"turns": ((0, 5),)}, r"turns\[0\] is a tuple, not a Turn"),
        *(
            ({"turns": (replace(TURN, **{name: value}),)}, rf"turns\[0\]\.{name} must be {kind}")
            for name, value, kind in (
                ("reward", True, "a number"),
                ("reward", None, "a number"),
                ("reward", "x", "a number"),
                ("reward", np.zeros(2), "a number"),
                ("reward", np.nan, "finite"),
                ("reward", np.inf, "finite"),
                ("reward", 1e39, "finite"),
                ("seconds", None, "a number"),
                ("start", 0.0, "an integer"),
                ("worker", None, "an integer"),
                ("resumed", False, "an integer"),
                ("finish_reason", None, "a text"),
            )
        ),
        ({"timing": ("a", 2, 3)}, r"timing\.started must be a number"),
        ({"timing": (1.0, 2.0, 3.0, 4.0)}, "timing is not a TrajectoryTiming"),
        ({"metadata": [1]}, "metadata must be a dict, not list"),
        ({"messages": {}}, "messages must be a list, not dict"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(**changes)


def test_numbers_of_numpy_are_as_good(tmp_path: Path) -> None:
    turn = replace(TURN, stop=np.int64(5), reward=np.float32(0.5), worker=np.int8(2))
    made = make(turns=(turn,), loss_mask=[1] * 5, versions=[3] * 5)
    assert made.turns == (replace(TURN, reward=0.5, worker=2),)
    save(tmp_path / "file", [made])
    assert load(tmp_path / "file")[0].turns == made.turns


def test_logprobs_that_were_not_asked_for_are_nan() -> None:
    nan = np.nan
    assert np.isnan(make(logprobs=[nan, nan, 0, nan, nan]).logprobs).sum() == 4


# --- from a session -------------------------------------------------------------------------------


def completion(chunks: Sequence[TokenChunk], prompt: bytes, **changes: Any) -> Completion:
    settings: dict[str, Any] = {
        "worker": 2,
        "resumed": 0,
        "prompt": prompt,
        "chunks": chunks,
        "wants_logprobs": True,
        "top_logprobs": 0,
        "submitted": 10.0,
        "sent": 10.5,
        "first": 11.0,
        "finished": 12.5,
        "decode": decode_bytes,
        "params": SamplingParams(),
        **changes,
    }
    return Completion(*settings.values())


def test_from_turns() -> None:
    prompt = i4([1, 2])
    response = i4([5, 6, 7, 20, 21, 8, 30])
    first = completion(
        [
            TokenChunk(i4([5, 6]), f4([-0.5, -1]), version=3),
            TokenChunk(i4([7]), f4([-2]), "length", 1, version=4),
        ],
        prompt,
        worker=1,
        resumed=1,
    )
    second = completion(
        [TokenChunk(i4([8]), f4([-4]), "stop", 6, version=4)],
        prompt + response[:20],
        submitted=14.0,
        sent=14.25,
        finished=16.5,
    )
    trajectory = Trajectory.from_turns(
        prompt,
        response,
        [0, 5],
        [first, second],
        [(0.5, (Reward("format", 1.0, 0.5),)), (1.0, ())],
        total=5.0,
        generating=4.0,
        metadata={"a": 1},
    )
    expected = Trajectory(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([5, 6, 7, 20, 21, 8, 30], np.int32),
        loss_mask=np.array([1, 1, 1, 0, 0, 1, 0], np.bool_),
        logprobs=np.array([-0.5, -1, -2, 0, 0, -4, 0], np.float32),
        versions=np.array([3, 3, 4, -1, -1, 4, -1], np.int32),
        turns=(
            Turn(
                start=0,
                stop=3,
                reward=0.5,
                finish_reason="length",
                worker=1,
                cached_tokens=1,
                prompt_tokens=2,
                resumed=1,
                seconds=2.5,
                rewards=(Reward("format", 1.0, 0.5),),
                waiting=0.5,
            ),
            Turn(
                start=5,
                stop=6,
                reward=1.0,
                finish_reason="stop",
                worker=2,
                cached_tokens=6,
                prompt_tokens=7,
                seconds=2.5,
                seconds_before=1.5,
                waiting=0.25,
            ),
        ),
        timing=trajectory.timing,
        metadata={"a": 1},
    )
    assert_same(trajectory, expected)
    assert trajectory.timing[1:] == (5.0, 4.0)
    # ``from_turns`` skips the checks: its arrays must pass them, and must be read-only.
    assert_same(trajectory.replace(), expected)
    for name, dtype in zip(ARRAYS, DTYPES, strict=True):
        assert getattr(trajectory, name).dtype == dtype
        assert not getattr(trajectory, name).flags.writeable


def test_from_a_turn_aborted_at_once_and_one_without_logprobs() -> None:
    nothing = completion([TokenChunk(b"", finish="abort")], i4([1]))
    silent = completion([TokenChunk(i4([5]), finish="stop")], i4([1, 9]), wants_logprobs=False)
    trajectory = Trajectory.from_turns(
        i4([1]),
        i4([9, 5]),
        [0, 1],
        [nothing, silent],
        [(0.0, ()), (2.0, ())],
        total=1.0,
        generating=1.0,
        metadata={},
    )
    assert [(turn.start, turn.stop) for turn in trajectory.turns] == [(0, 0), (1, 2)]
    np.testing.assert_array_equal(trajectory.logprobs, np.array([0, np.nan], np.float32))
    assert trajectory.loss_mask.tolist() == [False, True]
    assert trajectory.replace().rewards.tolist() == [0.0, 2.0]


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yield one folder for all examples of a property. Each example writes its file anew."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@settings(deadline=None)
@given(st.lists(trajectories(), max_size=4))
def test_a_file_holds_what_was_saved(folder: Path, saved: list[Trajectory]) -> None:
    path = folder / "some.traj"
    save(path, iter(saved))
    found = load(str(path))
    assert len(found) == len(saved)
    for one, other in zip(saved, found, strict=True):
        assert_same(one, other)
        assert all(type(turn) is Turn for turn in other.turns)
        assert type(other.timing) is TrajectoryTiming
        for name, dtype in zip(ARRAYS, DTYPES, strict=True):
            assert getattr(other, name).dtype == dtype
            assert not getattr(other, name).flags.writeable
    assert os.listdir(folder) == ["some.traj"]


def test_metadata_comes_back_as_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "x"
    metadata = {
        "score": np.float32(0.5),
        "group": np.int64(3),
        "pair": (1, 2),
        "row": np.array([1, 2]),
    }
    save(path, [make(metadata=metadata)])
    (found,) = load(path)
    assert found.metadata == {"score": 0.5, "group": 3, "pair": [1, 2], "row": [1, 2]}


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", {1: object()}])
def test_metadata_that_cannot_be_saved(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "x"
    save(path, [make()])
    before = path.read_bytes()
    with pytest.raises(UsageError, match="the metadata of trajectory 1 cannot be saved"):
        save(path, [make(), make(metadata={"a": value})])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x"]


def test_metadata_that_contains_itself(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UsageError, match="the metadata of trajectory 0 cannot be saved"):
        save(tmp_path / "x", [make(metadata={"a": circle})])


def test_only_trajectories_are_saved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="item 1 is a dict, not a Trajectory"):
        save(tmp_path / "x", [make(), {}])  # type: ignore[list-item]
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "nowhere" / "x", [make()])
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"sglr", b"PK\x03\x04 something else altogether"])
def test_a_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    why = "its first bytes are wrong" if content else "it is empty"
    with pytest.raises(UsageError, match=f"foreign is not a file of trajectories: {why}; sglrl"):
        load(path)


def test_a_newer_format(tmp_path: Path) -> None:
    path = tmp_path / "newer"
    save(path, [make()])
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match="newer has version 2 of the format, this sglrl reads"):
        load(path)


@pytest.fixture(scope="module")
def written(folder: Path) -> bytes:
    path = folder / "two"
    save(path, [make(), make(metadata={"text": "x" * 20})])
    data = path.read_bytes()
    path.unlink()
    return data


def refused(folder: Path, data: bytes) -> str:
    path = folder / "broken"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="broken ") as caught:
        load(path)
    path.unlink()
    return str(caught.value)


def test_a_file_cut_short_anywhere(folder: Path, written: bytes) -> None:
    for size in range(8, len(written)):
        assert "is cut short" in refused(folder, written[:size]), size


def test_a_file_with_any_byte_changed(folder: Path, written: bytes) -> None:
    for at in range(len(written)):
        data = bytearray(written)
        data[at] ^= 0x10
        refused(folder, bytes(data))


def test_a_file_with_something_behind_it(folder: Path, written: bytes) -> None:
    assert "is damaged: 3 bytes follow" in refused(folder, written + b"abc")


def test_iter_load_reads_one_trajectory_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x"
    given = [make(metadata={"i": i, "text": "x" * 100_000}) for i in range(40)]
    save(path, given)
    tracemalloc.start()
    try:
        seen = 0
        for i, one in enumerate(iter_load(path)):
            assert_same(one, given[i])
            seen += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == 40
    # The file has 4 MB. Two records and two trajectories have 0.4 MB.
    assert peak < 1_000_000


def test_iter_load_yields_what_is_before_the_damage(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save(path, [make(), make(metadata={"last": 1})])
    path.write_bytes(path.read_bytes()[:-1])
    reading = iter_load(path)
    assert_same(next(reading), make())
    with pytest.raises(UsageError, match="x is cut short: trajectory 1 of 2 is missing"):
        next(reading)


@pytest.mark.parametrize("ending", ["break", "error", "close"])
def test_iter_load_closes_its_file_when_the_loop_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    path = tmp_path / "x"
    save(path, [make()] * 3)
    opened: list[BinaryIO] = []

    def noted(*arguments: Any) -> Any:
        opened.append(open(*arguments))  # noqa: SIM115
        return opened[-1]

    monkeypatch.setattr(trajectory_files, "open", noted, raising=False)
    if ending == "close":
        reading = iter_load(path)
        next(reading)
        assert not opened[0].closed
        reading.close()
    else:
        with contextlib.suppress(KeyError):
            for _ in iter_load(path):
                assert not opened[0].closed
                if ending == "error":
                    raise KeyError
                break
    (file,) = opened
    assert file.closed


def test_iter_load_sets_the_decoder(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
            return f"{ids} {skip_special_tokens}"

    save(tmp_path / "x", [make(branches=(make(response_ids=[1, 2, 3, 4, 5]),))])
    for reader in (iter_load, load):
        (one,) = reader(tmp_path / "x", tokenizer=Tokenizer())
        assert one.text == "[4, 5, 6, 7, 8] False"
        assert one.branches[0].text == "[1, 2, 3, 4, 5] False"


def with_record(record: bytes) -> bytes:
    return struct.pack("<8sIQQI", b"sglrltrj", 1, 1, len(record), crc32(record)) + record


def fields_of(trajectory: Trajectory) -> list[Any]:
    fields: list[Any] = msgspec.msgpack.decode(trajectory_files._encode(trajectory, 0))
    return fields


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields[:3],
        lambda fields: "text",
        lambda fields: [b"\1\2\3", *fields[1:]],
        lambda fields: [*fields[:2], b"\2\1\0\1\1", *fields[3:]],
        lambda fields: [*fields[:4], i4([1] * 5), *fields[5:]],
        lambda fields: [*fields[:5], [[0, 99]], *fields[6:]],
        lambda fields: [*fields[:7], 5],
    ],
)
def test_records_that_are_no_trajectories(folder: Path, change: Callable[[Any], Any]) -> None:
    """The checksum is right, but the writer used another format for trajectories."""
    fields = fields_of(make())
    assert_same(trajectory_files._decode(msgspec.msgpack.encode(fields)), make())
    data = with_record(msgspec.msgpack.encode(change(fields)))
    assert "is damaged: trajectory 0 of 1: " in refused(folder, data)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_as_a_record(folder: Path, record: bytes) -> None:
    assert "is damaged: trajectory 0 of 1: " in refused(folder, with_record(record))


def test_metadata_with_a_key_that_python_cannot_hash(folder: Path) -> None:
    fields = fields_of(make(metadata={"k": 1}))
    data = msgspec.msgpack.encode(fields)
    # Replace {"k": 1} by a map with a list as its key.
    assert data.count(b"\x81\xa1k\x01") == 1
    data = data.replace(b"\x81\xa1k\x01", b"\x81\x81\x01\x02\x01")
    assert "is damaged" in refused(folder, with_record(data))


def test_fields_that_a_later_version_appends_are_passed_over(folder: Path) -> None:
    path = folder / "later"
    path.write_bytes(with_record(msgspec.msgpack.encode([*fields_of(make()), "new"])))
    (found,) = load(path)
    path.unlink()
    assert_same(found, make())


def test_importing_it_brings_neither_torch_nor_sockets() -> None:
    code = """
import sys
import sglrl.rollouts
heavy = {"torch", "tensordict", "zmq", "transformers", "sglang", "uvloop", "cloudpickle", "rich"}
print(*sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == []
