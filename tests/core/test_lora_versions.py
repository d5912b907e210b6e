"""The versions of adapters in trajectories, files and records."""

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
from sglrl.sessions.trajectory import Record, Trajectory, record_of
from sglrl.sessions.trajectory_files import load, save, to_jsonl
from sglrl.wire.engine import TokenChunk

from .byte_decoder import decode_bytes
from .test_trajectory import f4, i4, make

VERSIONS = [0, 2, -1, -1, 7]
"""For the response of ``make``, whose third token is an observation. The fourth has no adapter."""


def completion(chunks: list[TokenChunk], lora: str | None) -> Completion:
    times = (1.0, 1.0, 2.0, 3.0)
    params = SamplingParams()
    return Completion(0, 0, i4([1]), chunks, True, 0, *times, decode_bytes, params, (), lora)


def from_turns(*turns: Completion) -> Trajectory:
    return Trajectory.from_turns(
        i4([1]),
        i4([4, 5, 6, 7, 8, 9]),
        [0, 4][: len(turns)],
        turns,
        [(0.0, ())] * len(turns),
        total=1.0,
        generating=1.0,
        metadata={},
    )


CHUNKS = [
    TokenChunk(i4([4, 5]), f4([0, 0]), version=3, lora_version=1),
    TokenChunk(i4([6]), f4([0]), "stop", version=4, lora_version=2),
]
PLAIN = [TokenChunk(i4([8]), f4([0]), "stop", version=4)]


def test_turns_join_their_versions() -> None:
    made = from_turns(completion(CHUNKS, "a"), completion(PLAIN, None))
    found = made.lora_versions
    assert found is not None
    assert (found.dtype, found.flags.writeable) == (np.int32, False)
    assert found.tolist() == [1, 1, 2, -1, -1, -1]
    assert made.versions.tolist() == [3, 3, 4, -1, 4, -1]
    # ``from_turns`` skips the checks: its versions must pass them.
    assert made.replace().lora_versions.tolist() == found.tolist()
    assert from_turns(completion(PLAIN, None)).lora_versions is None


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ([0, 1], "lora_versions has 2 positions, response_ids 5"),
        ([0, 1, 0, 1, 1], "-1 where loss_mask is False"),
        ([0, -2, -1, 1, 1], "must be >= -1"),
        ([0.5, 1, -1, 1, 1], "lora_versions must be int32"),
        ([[0], [1]], "one dimension"),
        (3, "one dimension"),
    ],
)
def test_wrong_versions(versions: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(lora_versions=versions)


def test_files(tmp_path: Path) -> None:
    given = make(lora_versions=VERSIONS, branches=(make(lora_versions=VERSIONS),))
    save(tmp_path / "file", [given, make()])
    one, other = load(tmp_path / "file")
    assert other.lora_versions is None
    for found in (one.lora_versions, one.branches[0].lora_versions):
        assert found is not None
        assert (found.tolist(), found.dtype) == (VERSIONS, np.int32)
    to_jsonl(tmp_path / "lines", [given, make()])
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["lora_versions"] for line in lines] == [VERSIONS, None]


def test_a_record_of_another_process() -> None:
    decode = msgspec.msgpack.Decoder(Record).decode
    record = decode(msgspec.msgpack.encode(record_of(make(lora_versions=VERSIONS))))
    found = Trajectory.from_record(record).lora_versions
    assert found is not None
    assert found.tolist() == VERSIONS
    plain = decode(msgspec.msgpack.encode(record_of(make())))
    assert Trajectory.from_record(plain).lora_versions is None
    # A record of an older file ends before the new field.
    old = decode(msgspec.msgpack.encode([*msgspec.structs.astuple(plain)][:-1]))
    assert Trajectory.from_record(old).lora_versions is None
    with pytest.raises(ProtocolError):
        Trajectory.from_record(msgspec.structs.replace(record, lora_versions=i4([1])))
