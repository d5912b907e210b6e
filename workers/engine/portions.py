"""Of a thousand requests that arrive at once, an engine gets as many as its next step can prefill.

SGLang spends tens of microseconds on each one that it is given before it launches a step. What
cannot be in that step is better taken in while the GPU is at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FEW: Final = 64
"""Requests that are not worth the looking."""


def first_portion(sizes: Sequence[int], tokens: int) -> int:
    """How many are given to the engine now: until their prompts have ``tokens`` tokens.

    Args:
        sizes: of each, how many tokens it has to prefill; 0: it goes with what is before it; less
            than 0: it is not to wait, so nothing does.
    """
    if len(sizes) < FEW or min(sizes) < 0:
        return len(sizes)
    for at, size in enumerate(sizes):
        if size and tokens <= 0:
            return at
        tokens -= size
    return len(sizes)
