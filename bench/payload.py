"""What every system of ``bench.fabric`` carries: 64 token ids in, 64 ids and 64 logprobs out."""

from __future__ import annotations

import random

VOCAB = 151_936
TOKENS = 64
LOGPROBS = [-(i + 1) / 1024 for i in range(TOKENS)]
_STREAM_BITS = 17


class Prompts:
    """``prompts[i]``: a list of 64 token ids; 131,072 distinct ones.

    They are windows of one random stream, cut when asked for: a list for each beforehand would
    make the garbage collector's work part of the figures.
    """

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._mask = (1 << _STREAM_BITS) - 1
        self._stream = [draw.randrange(VOCAB) for _ in range((1 << _STREAM_BITS) + TOKENS)]

    def __getitem__(self, i: int) -> list[int]:
        at = i & self._mask
        return self._stream[at : at + TOKENS]
