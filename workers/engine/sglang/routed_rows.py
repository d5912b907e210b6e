"""Collect the routed experts of a request's tokens until they are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[Any]
"""The experts of some tokens: uint8 or int16, shape [tokens, layers, k]."""


class RoutedRows:
    """Rows of routed experts, one for each position of prompt and output from ``begin`` on.

    If a position is added again, its first row stays.

    Attributes:
        prompt: the number of tokens in the prompt.
    """

    __slots__ = ("_end", "_rows", "prompt")

    def __init__(self, begin: int, prompt: int) -> None:
        self.prompt = prompt
        self._end = begin
        """The first position without a row."""
        self._rows: list[Rows] = []

    def add(self, at: int, rows: Rows, cached: Callable[[int, int], Rows]) -> None:
        """Add the rows that a step has computed, from position ``at`` on.

        Args:
            cached: returns the rows of positions whose KV was cached before the step.
        """
        if self._end < at:
            self._rows.append(cached(self._end, at))
            self._end = at
        new = rows[self._end - at :]
        if len(new):
            self._rows.append(new)
            self._end += len(new)

    def take(self, tokens: int) -> Rows | None:
        """Return the new rows of the prompt and of the first ``tokens`` output tokens.

        The last of these tokens has no row, because it has not been the input of a step.

        Returns:
            None if there is no new row.
        """
        if not self._rows:
            return None
        rows = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        count = len(rows) - max(0, self._end - (self.prompt + tokens - 1))
        if count <= 0:
            return None
        self._rows = [rows[count:]] if count < len(rows) else []
        return rows[:count]
