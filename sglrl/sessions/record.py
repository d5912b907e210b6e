"""The msgpack format in which trajectories are written to files and sent to other processes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..wire.engine import RoutedShape
from .arrays import ROUTED_DTYPES
from .turn import TrajectoryTiming, Turn


class RoutedRecord(msgspec.Struct, array_like=True, frozen=True):
    """Routed experts as msgpack: the shape of one row, and all rows as little-endian bytes."""

    shape: RoutedShape
    rows: bytes


class Record(msgspec.Struct, array_like=True, frozen=True):
    """A ``Trajectory`` as msgpack. Arrays are little-endian bytes; loss_mask has 1 byte per token.

    Trajectory files contain records. New fields may be added at the end, with defaults. Any other
    change needs a new version of the file format.
    """

    prompt_ids: bytes
    response_ids: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    turns: tuple[Turn, ...]
    timing: TrajectoryTiming
    metadata: dict[Any, Any]
    messages: list[dict[str, Any]] | None = None
    branches: tuple[Record, ...] = ()
    mask_ids: bytes = b""
    mask_lengths: bytes | None = None
    lora_versions: bytes | None = None
    routed: RoutedRecord | None = None


def record_of_rows(rows: NDArray[Any]) -> RoutedRecord:
    """Return the record of routed experts, [n, layers, k]. Their data is not copied."""
    _, layers, k = rows.shape
    data: Any = rows.reshape(-1).view(np.uint8).data
    return RoutedRecord(RoutedShape(layers, k, rows.dtype.str), data)


def rows_of(record: Record) -> NDArray[Any] | None:
    """Return the routed experts of a record, uint8 or int16 [n, layers, k], read-only.

    Raises:
        ValueError: the dtype is not supported, or the bytes are not a whole number of rows.
    """
    if record.routed is None:
        return None
    (layers, k, dtype), data = record.routed.shape, record.routed.rows
    if dtype not in [known.str for known in ROUTED_DTYPES]:
        raise ValueError(f"routed experts of dtype {dtype!r}")
    return np.frombuffer(data, dtype).reshape(-1, layers, k)
