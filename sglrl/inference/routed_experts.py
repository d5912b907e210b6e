"""Collect the routed experts of a call: the experts that a mixture of experts chose per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest, ProtocolError
from ..wire.codec import Buffer
from ..wire.engine import GenerateArgs, RoutedShape, TokenChunk

NO_EXPERTS: Final = (
    "return_routed_experts=True needs a mixture of experts and an engine with "
    "launch(..., enable_return_routed_experts=True)"
)


def check_begin(args: GenerateArgs) -> None:
    """Raise ``InvalidRequest`` if the first requested position of routed experts is impossible."""
    begin, rows = args.routed_from, args.resume_rows
    if begin < 0 or rows < 0 or 4 * (begin + rows) >= len(args.input_ids) + len(args.resume):
        raise InvalidRequest(f"no routed experts begin at position {begin} + {rows}")


class RoutedRows:
    """The routed experts of one call: a row for each position of prompt and output from ``start``.

    Attributes:
        shape: the shape and dtype of a row.
        start: the position of the first row.
        count: the number of rows that have arrived.
    """

    __slots__ = ("_frames", "count", "shape", "start")

    def __init__(self, shape: RoutedShape, start: int = 0) -> None:
        self.shape = shape
        self.start = start
        self.count = 0
        self._frames: list[Buffer] = []

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + self.count

    def copy(self) -> RoutedRows:
        """Return a copy, to which more rows can be added without changing the original."""
        made = RoutedRows(self.shape, self.start)
        made.count, made._frames = self.count, self._frames[:]
        return made

    def add(self, chunk: TokenChunk, frames: Sequence[Buffer]) -> None:
        """Add the rows of a chunk.

        Raises:
            ProtocolError: the size of the frames does not match the number of rows.
        """
        size = self.shape.layers * self.shape.k * np.dtype(self.shape.dtype).itemsize
        if chunk.routed * size != sum(map(len, frames)) or any(len(f) % size for f in frames):
            raise ProtocolError(
                f"the worker sent {chunk.routed} rows of routed experts in frames of another size"
            )
        self.count += chunk.routed
        self._frames += frames

    def check_end(self, tokens: int, sampled: int) -> None:
        """Check that all rows of a finished call have arrived.

        Args:
            tokens: the number of tokens of prompt and output.
            sampled: the number of tokens of the output.

        Raises:
            ProtocolError: the number of rows is wrong.
        """
        # There is a row for each token but the last. A call that was aborted before its first token
        # may have fewer rows, because only a part of the prompt may have been prefilled.
        if self.stop >= tokens or (sampled and self.stop != tokens - 1):
            raise ProtocolError(
                f"the worker sent routed experts up to position {self.stop} of {tokens} tokens"
            )

    def array(self) -> NDArray[Any]:
        """Return the rows: uint8 or int16 [count, layers, k], read-only."""
        layers, k, dtype = self.shape
        parts = [np.frombuffer(frame, dtype) for frame in self._frames]
        rows = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])
        rows = rows.reshape(-1, layers, k)
        rows.flags.writeable = False
        return rows
