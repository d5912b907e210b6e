"""Join and check the arrays of a trajectory, and find the oldest policy versions in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.policy_versions import MODEL, oldest_of
from ..errors import UsageError
from ..inference.completion import Completion
from ..inference.sampling_mask import SamplingMask
from .turn import Turn

_INT32: Final = np.dtype("<i4")
_KINDS: Final = {"i": "iu", "b": "biu", "f": "fiu"}
ROUTED_DTYPES: Final = (np.dtype("u1"), np.dtype("<i2"))


class Leaf(Protocol):
    """A ``Trajectory`` without branches, with the properties that this module reads."""

    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...
    @property
    def versions(self) -> NDArray[np.int32]: ...
    @property
    def lora_versions(self) -> NDArray[np.int32] | None: ...
    @property
    def turns(self) -> Sequence[Turn]: ...


def read_only(name: str, values: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return ``values`` as a read-only array of this dtype.

    A contiguous read-only array of this dtype is returned without a copy.

    Raises:
        UsageError: the values are not a one-dimensional array, or do not fit the dtype.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise UsageError(f"{name} is not an array: {error}") from error
    if array.ndim != 1:
        raise UsageError(f"{name} must have one dimension, not {array.ndim}")
    if array.dtype != dtype:
        # numpy makes a float array of an empty list, so check the kind only if there are values.
        if len(array) and array.dtype.kind not in _KINDS[dtype.kind]:
            raise UsageError(f"{name} must be {dtype.name}, not {array.dtype.name}")
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        if dtype.kind != "f" and (narrow != array).any():
            raise UsageError(f"{name} holds a value that does not fit into {dtype.name}")
        array = narrow
    elif array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()
    array.flags.writeable = False
    return array


def joined_masks(
    size: int, starts: Sequence[int], turns: Sequence[Completion]
) -> SamplingMask | None:
    """Return the sampling mask of a response of ``size`` tokens, or None if no turn has one.

    Args:
        starts: for each turn, the position at which its tokens begin.
    """
    if not any(turn.params.return_sampling_mask for turn in turns):
        return None
    lengths = np.zeros(size, np.int64)
    ids = [np.zeros(0, np.int32)]
    for start, turn in zip(starts, turns, strict=True):
        mask = turn.sampling_mask
        if mask is not None:
            lengths[start : start + len(mask.lengths)] = mask.lengths
            ids.append(mask.ids)
    return _frozen(np.concatenate(ids), np.concatenate([[0], lengths.cumsum()]))


def routed_stop(path: Sequence[Completion]) -> int:
    """Return the first position without routed experts in a conversation."""
    stop = 0
    for turn in path:
        rows = turn.routed_rows
        if rows is not None and rows.start <= stop:
            stop = max(stop, rows.stop)
    return stop


def joined_rows(path: Sequence[Completion]) -> NDArray[Any] | None:
    """Return the routed experts of a conversation, or None if no turn has any.

    If several turns have a row for the same position, the row of the first turn is used.

    Args:
        path: all turns of the conversation, in order.

    Returns:
        uint8 or int16 [n, layers, k], for the first n tokens.
    """
    parts: list[NDArray[Any]] = []
    stop = 0
    for turn in path:
        rows = turn.routed_experts
        if rows is not None and turn.routed_from <= stop:
            new = rows[stop - turn.routed_from :]
            parts.append(new)
            stop += len(new)
    if not parts:
        return None
    joined: NDArray[Any] = np.concatenate(parts)
    joined.flags.writeable = False
    return joined


def checked_rows(rows: NDArray[Any] | None, tokens: int) -> NDArray[Any] | None:
    """Return the routed experts of a trajectory of ``tokens`` tokens as a read-only array.

    Raises:
        UsageError: the rows have a wrong dtype or shape, or there are more rows than tokens.
    """
    if rows is None:
        return None
    if not isinstance(rows, np.ndarray) or rows.ndim != 3 or rows.dtype not in ROUTED_DTYPES:
        raise UsageError("routed_experts must be an array [n, layers, k] of uint8 or int16")
    if len(rows) > tokens:
        raise UsageError(f"routed_experts has {len(rows)} rows of {tokens} tokens")
    if rows.dtype.kind == "i" and (rows < 0).any():
        raise UsageError("routed_experts holds a negative number")
    if rows.flags.writeable or not rows.flags.c_contiguous:
        rows = rows.copy()
        rows.flags.writeable = False
    return rows


def checked_mask(
    mask: SamplingMask | None, response: NDArray[np.int32], sampled: NDArray[np.bool_]
) -> SamplingMask | None:
    """Return a sampling mask with read-only arrays.

    Raises:
        UsageError: the arrays of the mask do not match each other or the response, or the set of a
            position lacks the token that was sampled there.
    """
    if mask is None:
        return None
    try:
        ids, offsets = mask
    except (TypeError, ValueError):
        raise UsageError(f"sampling_mask must be a SamplingMask, not {mask!r:.100}") from None
    ids = read_only("sampling_mask.ids", ids, _INT32)
    offsets = read_only("sampling_mask.offsets", offsets, np.dtype("<i8"))
    checked = SamplingMask(ids, offsets)
    if not is_consistent(checked, len(response)):
        raise UsageError(
            f"sampling_mask.offsets must have {len(response) + 1} values, one more than "
            f"response_ids, that ascend from 0 to {len(ids)}, the number of its ids"
        )
    lengths = np.diff(offsets)
    if lengths[~sampled].any():
        raise UsageError("sampling_mask must be empty where loss_mask is False")
    inside = np.zeros(len(response), np.bool_)
    position = np.repeat(np.arange(len(response)), lengths)
    inside[position[ids == response[position]]] = True
    if (~inside[lengths > 0]).any():
        raise UsageError("sampling_mask lacks a sampled token in its own set")
    return checked


def joined_loras(
    size: int, starts: Sequence[int], turns: Sequence[Completion]
) -> NDArray[np.int32] | None:
    """Return ``Trajectory.lora_versions`` of a response of ``size`` tokens, or None without LoRA.

    Args:
        starts: for each turn, the position at which its tokens begin.
    """
    if all(turn.lora is None for turn in turns):
        return None
    versions = np.full(size, -1, _INT32)
    for start, turn in zip(starts, turns, strict=True):
        for span in turn.lora_versions:
            versions[start + span.start : start + span.stop] = span.version
    versions.flags.writeable = False
    return versions


def checked_loras(values: Any, sampled: NDArray[np.bool_]) -> NDArray[np.int32] | None:
    """Return ``Trajectory.lora_versions`` as a read-only array. Return None unchanged.

    Raises:
        UsageError: the values do not match the tokens and the loss mask of the response.
    """
    if values is None:
        return None
    versions = read_only("lora_versions", values, _INT32)
    if len(versions) != len(sampled):
        raise UsageError(
            f"lora_versions has {len(versions)} positions, response_ids {len(sampled)}; they must "
            "agree"
        )
    if (versions < -1).any() or (versions[~sampled] != -1).any():
        raise UsageError("lora_versions must be >= -1, and -1 where loss_mask is False")
    return versions


def is_consistent(mask: SamplingMask, size: int) -> bool:
    """Return whether the offsets of a mask divide its ids into ``size`` sets."""
    offsets = mask.offsets
    ends = len(offsets) == size + 1 and offsets[0] == 0 and offsets[-1] == len(mask.ids)
    return bool(ends and (np.diff(offsets) >= 0).all())


def _frozen(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> SamplingMask:
    ids.flags.writeable = offsets.flags.writeable = False
    return SamplingMask(ids, offsets)


def oldest_of_turns(turns: Iterable[Completion]) -> dict[str, int]:
    """Return, for each policy, the oldest version that sampled a token of these turns."""
    oldest: dict[str, int] = {}
    for turn in turns:
        lora = turn.lora
        for chunk in turn.chunks:
            if chunk.ids:
                oldest[MODEL] = min(chunk.version, oldest.get(MODEL, chunk.version))
                if lora is not None:
                    oldest[lora] = min(chunk.lora_version, oldest.get(lora, chunk.lora_version))
    return oldest


def oldest_of_leaves(leaves: Iterable[Leaf]) -> dict[str, int]:
    """Return, for each policy, the oldest version that sampled a token of these conversations."""
    versions: list[dict[str, int]] = []
    for leaf in leaves:
        sampled = leaf.versions[leaf.loss_mask]
        if len(sampled):
            versions.append({MODEL: int(sampled.min())})
        if leaf.lora_versions is not None:
            for turn in leaf.turns:
                own = leaf.lora_versions[turn.start : turn.stop]
                own = own[own >= 0]
                if turn.lora and len(own):
                    versions.append({turn.lora: int(own.min())})
    return oldest_of(versions)
