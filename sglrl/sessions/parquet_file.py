"""Write trajectories as Parquet, for pyarrow, Hugging Face ``datasets``, pandas, polars and DuckDB.

Every file has the same schema, whatever its trajectories contain. So values whose form may differ
from row to row are JSON text.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..config import install
from ..errors import UsageError
from .atomic_file import new_content
from .trajectory import Trajectory
from .trajectory_files import fields_of, json_of, metadata_errors, numbered
from .whole_groups import Given

if TYPE_CHECKING:
    import pyarrow

_JSON: Final = ("messages", "oldest_versions", "metadata")
"""The columns with JSON text."""
_ROW_GROUP_BYTES: Final = 32 << 20
"""A row group ends with the row that reaches this number of bytes in memory."""


def to_parquet(path: str | os.PathLike[str], trajectories: Given[Trajectory]) -> None:
    """Write trajectories or groups as a Parquet file: one row for each trajectory.

    The columns are the fields of ``to_jsonl``. Token ids and versions are lists of int32, logprobs
    are lists of float32, and ``loss_mask`` is a list of bool. ``turns``, ``timing`` and
    ``branches`` are structs. ``messages``, ``metadata`` and ``oldest_versions`` are JSON text.
    ``messages`` is null if the session did not begin with messages. A NaN in ``logprobs`` stays
    NaN.

    A row group ends when its rows have reached 32 MiB in memory, so that a file of any size needs
    little memory.

    Raises:
        UsageError: an item is not a ``Trajectory`` or a ``Group``, or a value cannot be encoded.
        ImportError: pyarrow is not installed.
        OSError: the file cannot be written. ``path`` is unchanged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"pyarrow is needed: {install('parquet')}") from error
    schema = _schema()
    with new_content(path) as file, pyarrow.parquet.ParquetWriter(file, schema) as writer:
        rows: list[dict[str, Any]] = []
        size = 0
        for index, trajectory in numbered(trajectories):
            with metadata_errors(index):
                rows.append(_with_json(fields_of(trajectory)))
            size += _bytes_of(rows[-1])
            if size >= _ROW_GROUP_BYTES:
                writer.write_batch(_row_group(rows, schema, index))
                rows, size = [], 0
        if rows:
            writer.write_batch(_row_group(rows, schema, index))


def _row_group(rows: list[dict[str, Any]], schema: pyarrow.Schema, last: int) -> Any:
    """Return the rows as one batch. ``last`` is the index of the last row's trajectory."""
    import pyarrow

    try:
        return pyarrow.RecordBatch.from_pylist(rows, schema)
    except (TypeError, ValueError, OverflowError) as error:
        which = f"one of the trajectories {last - len(rows) + 1} to {last}"
        raise UsageError(f"{which} has a value that Parquet cannot hold: {error}") from error


def _bytes_of(value: Any) -> int:
    """Return about how many bytes of memory a row, or a value in it, needs."""
    if isinstance(value, dict):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, list):
        return sum(map(_bytes_of, value))
    if isinstance(value, np.ndarray):
        return 100 + value.nbytes
    return 8 + len(value) if isinstance(value, str) else 8


def _with_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a trajectory or a branch with JSON text in the columns ``_JSON``."""
    texts = {
        name: None if fields[name] is None else json_of(fields[name]).decode() for name in _JSON
    }
    return {**fields, **texts, "branches": [_with_json(branch) for branch in fields["branches"]]}


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    ids, number = pa.list_(pa.int32()), pa.float64()
    reward = {
        "name": pa.string(),
        "value": number,
        "weight": number,
        "call": pa.string(),
        "whole": pa.bool_(),
    }
    turn = {
        "start": pa.int64(),
        "stop": pa.int64(),
        "reward": number,
        "finish_reason": pa.string(),
        "worker": pa.int64(),
        "cached_tokens": pa.int64(),
        "prompt_tokens": pa.int64(),
        "resumed": pa.int64(),
        "seconds": number,
        "seconds_before": number,
        "rewards": pa.list_(pa.struct(reward)),
        "lora": pa.string(),
        "waiting": number,
    }
    fields = {
        "text": pa.string(),
        "messages": pa.string(),
        "reward": number,
        "finish_reason": pa.string(),
        "oldest_version": pa.int32(),
        "oldest_versions": pa.string(),
        "prompt_ids": ids,
        "response_ids": ids,
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "versions": ids,
        "sampling_mask": pa.list_(ids),
        "lora_versions": ids,
        "turns": pa.list_(pa.struct(turn)),
        "timing": pa.struct({"started": number, "total": number, "generating": number}),
        "metadata": pa.string(),
    }
    # A branch has no branches of its own, and Parquet has no recursive types.
    return pa.schema({**fields, "branches": pa.list_(pa.struct(fields))})
