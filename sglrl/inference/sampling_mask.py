"""``SamplingMask``: the tokens that could be drawn at each position of an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..wire.engine import TokenChunk


class SamplingMask(NamedTuple):
    """The set of tokens that could be drawn, at each of t positions.

    The set of position i is ``ids[offsets[i] : offsets[i + 1]]``. It contains the drawn token.

    Attributes:
        ids: int32 [m], the token ids of all sets, one set after the other. Each set is in ascending
            order.
        offsets: int64 [t + 1], where each set begins. The first offset is 0, and the last one is m.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens at each position, int32 [t]."""
        return np.diff(self.offsets).astype(np.int32)

    def sets(self) -> list[NDArray[np.int32]]:
        """Return the ids of each position. The arrays are views."""
        return np.split(self.ids, self.offsets[1:])[:-1]

    def __repr__(self) -> str:
        return f"<SamplingMask of {len(self.offsets) - 1} tokens, {len(self.ids)} ids>"


def mask_from(ids: bytes, lengths: bytes) -> SamplingMask:
    """Make a mask from the ids and the number of ids at each position, both as int32 bytes."""
    counts = np.frombuffer(lengths, "<i4")
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    offsets.flags.writeable = False
    return SamplingMask(np.frombuffer(ids, "<i4"), offsets)


def mask_of(chunks: Sequence[TokenChunk]) -> SamplingMask:
    """Return the mask of all tokens of the chunks."""
    ids = b"".join([chunk.mask_ids for chunk in chunks])
    return mask_from(ids, b"".join([chunk.mask_lengths for chunk in chunks]))


def is_whole(chunk: TokenChunk) -> bool:
    """Return whether a chunk has a set of drawable tokens for each of its tokens."""
    if len(chunk.mask_lengths) != len(chunk.ids) or len(chunk.mask_ids) % 4:
        return False
    lengths = np.frombuffer(chunk.mask_lengths, "<i4")
    total = int(lengths.sum(dtype=np.int64))
    return bool((lengths > 0).all()) and total == len(chunk.mask_ids) // 4
