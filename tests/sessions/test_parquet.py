"""Trajectories as Parquet and JSON Lines: Hugging Face ``datasets`` loads what was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict

import sglrl
import sglrl.rollouts
from sglrl.inference.sampling_mask import SamplingMask
from sglrl.rollouts import to_jsonl
from sglrl.sessions import parquet_file

ARRAYS = {
    "prompt_ids": "int32",
    "response_ids": "int32",
    "loss_mask": "bool",
    "logprobs": "float32",
    "versions": "int32",
}
ASK = [{"role": "user", "content": "Add one."}]


def make(**changes: Any) -> sglrl.Trajectory:
    values: dict[str, Any] = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5, 6, 7],
        "loss_mask": [True, True, False, True],
        "logprobs": [-0.1, np.nan, 0.0, -1.5],
        "versions": [3, 4, -1, 4],
        "turns": (
            sglrl.Turn(start=0, stop=2, reward=0.5, rewards=(sglrl.Reward("form", 1.0, 0.5),)),
            sglrl.Turn(start=3, stop=4, reward=0.25, finish_reason="length", lora="x"),
        ),
        "timing": sglrl.TrajectoryTiming(1e9, 2.5, 2.0),
        "metadata": {"item": 7, "sample": 0},
        "messages": ASK,
    }
    return sglrl.Trajectory(**{**values, **changes})


def full() -> sglrl.Trajectory:
    """Return a trajectory with every optional field and a branch."""
    mask = SamplingMask(np.array([4, 9, 5, 7]), np.array([0, 2, 3, 3, 4]))
    own = make(metadata={"item": 7, "sample": 1}, sampling_mask=mask, lora_versions=[-1, -1, -1, 8])
    return own.replace(branches=(make(),)).with_decode(lambda ids, skip: f"decoded {ids}")


def loaded(kind: str, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load a file with Hugging Face ``datasets``, without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets.load_dataset(kind, data_files=str(file), split="train", cache_dir=str(cache))


def assert_row(
    row: dict[str, Any], one: sglrl.Trajectory, *, text: bool, nan: float | None
) -> None:
    """Check that a row has the values of a trajectory.

    Args:
        text: whether free values are JSON text.
        nan: what null in the logprobs stands for. None: there must be no null.
    """
    free = {name: row[name] for name in ("messages", "metadata", "oldest_versions")}
    if text:
        free = {name: json.loads(value) for name, value in free.items()}
    assert free["messages"] == one.messages
    assert free["metadata"] == one.metadata
    # Without a schema, ``datasets`` gives all rows the same keys.
    versions = {
        name: version for name, version in free["oldest_versions"].items() if version is not None
    }
    assert versions == one.oldest_versions
    assert row["reward"] == one.reward
    assert row["finish_reason"] == one.finish_reason
    assert row["oldest_version"] == one.oldest_version
    for name, dtype in ARRAYS.items():
        found = [nan if value is None else value for value in row[name]]
        # If keys differ between rows, ``datasets`` rounds the floats of JSON to 10 decimals.
        np.testing.assert_array_equal(np.array(found, dtype), getattr(one, name), err_msg=name)
    assert (None in row["logprobs"]) == (nan is not None)
    sets = None if one.sampling_mask is None else [ids.tolist() for ids in one.sampling_mask.sets()]
    assert row["sampling_mask"] == sets
    assert row["lora_versions"] == (
        None if one.lora_versions is None else one.lora_versions.tolist()
    )
    turns = [{**asdict(t), "rewards": [asdict(r) for r in t.rewards]} for t in one.turns]
    assert row["turns"] == turns
    assert row["timing"] == one.timing._asdict()
    # In Parquet, a branch has no column for branches of its own.
    for branch, expected in zip(row.get("branches", ()), one.branches, strict=True):
        assert_row(branch, expected, text=text, nan=nan)


def test_datasets_loads_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [make(), full(), make(messages=[], metadata={"other": [1, "two", None], "item": "x"})]
    sglrl.rollouts.to_parquet(tmp_path / "file.parquet", given)
    data = loaded("parquet", tmp_path / "file.parquet", tmp_path / "cache", monkeypatch)
    assert len(data) == 3
    for name, dtype in ARRAYS.items():
        assert data.features[name].feature.dtype == dtype
    for row, one in zip(data, given, strict=True):
        assert_row(row, one, text=True, nan=None)
    assert [row["text"] for row in data] == [None, "decoded [4, 5, 6, 7]", None]


def test_datasets_loads_json_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [make(), full()]
    to_jsonl(tmp_path / "file.jsonl", given)
    data = loaded("json", tmp_path / "file.jsonl", tmp_path / "cache", monkeypatch)
    assert len(data) == 2
    for row, one in zip(data, given, strict=True):
        assert_row(row, one, text=False, nan=np.nan)
    assert [row["text"] for row in data] == [None, "decoded [4, 5, 6, 7]"]


def test_every_file_has_the_same_schema(tmp_path: Path) -> None:
    import pyarrow.parquet

    plain = make(messages=None, metadata={}, turns=(sglrl.Turn(start=0, stop=4),))
    schemas = []
    for name, given in (("empty", []), ("plain", [plain]), ("full", [full()])):
        sglrl.rollouts.to_parquet(tmp_path / name, given)
        schemas.append(pyarrow.parquet.read_schema(tmp_path / name))
        table = pyarrow.parquet.read_table(tmp_path / name)
        assert table.num_rows == len(given)
    assert schemas[0].equals(schemas[1])
    assert schemas[0].equals(schemas[2])
    assert pyarrow.parquet.read_table(tmp_path / "plain")["messages"].to_pylist() == [None]


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group ends at its limit, and no trajectory is read long before it is written."""
    import pyarrow.parquet

    size = parquet_file._bytes_of(parquet_file._with_json(parquet_file.fields_of(make())))
    monkeypatch.setattr(parquet_file, "_ROW_GROUP_BYTES", 3 * size)
    written: list[int] = []
    write = parquet_file._row_group

    def row_group(rows: list[Any], *rest: Any) -> Any:
        written.append(len(rows))
        return write(rows, *rest)

    monkeypatch.setattr(parquet_file, "_row_group", row_group)

    def given() -> Iterator[sglrl.Trajectory]:
        for i in range(8):
            assert sum(written) == i // 3 * 3
            yield make(metadata={"item": i, "sample": 0})

    sglrl.rollouts.to_parquet(tmp_path / "file", given())
    assert written == [3, 3, 2]
    file = pyarrow.parquet.ParquetFile(tmp_path / "file")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert groups == written
    items = [json.loads(text)["item"] for text in file.read()["metadata"].to_pylist()]
    assert items == list(range(8))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: make(metadata={"a": object()}), "the metadata of trajectory 1 cannot be saved"),
        (dict, "item 1 is a dict, not a Trajectory"),
        (
            lambda: make(turns=(sglrl.Turn(start=0, stop=4, worker=2**70),)),
            "one of the trajectories 0 to 1 has a value that Parquet cannot hold",
        ),
    ],
)
def test_a_file_stays_as_it_was_after_an_error(tmp_path: Path, bad: Any, says: str) -> None:
    path = tmp_path / "file"
    sglrl.rollouts.to_parquet(path, [make()])
    before = path.read_bytes()
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.rollouts.to_parquet(path, [make(), bad()])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_without_pyarrow_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pyarrow is needed: pip install .*\[parquet\]"):
        sglrl.rollouts.to_parquet(tmp_path / "file", [make()])
    assert os.listdir(tmp_path) == []


def test_importing_it_does_not_import_pyarrow() -> None:
    code = "import sys, sglrl.rollouts; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
