"""The payload for fake engines and their peers: 64 ids in, 64 ids and 64 logprobs out."""

from __future__ import annotations

import random

VOCAB = 151_936
TOKENS = 64
LOGPROBS = [-(i + 1) / 1024 for i in range(TOKENS)]
_STREAM_BITS = 17


class Prompts:
    """131,072 distinct prompts. ``prompts[i]`` is a list of 64 token ids.

    The prompts are windows of one random stream, and a list is made only when it is needed. If all
    lists existed, the garbage collector's work on them would be part of the figures.
    """

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._mask = (1 << _STREAM_BITS) - 1
        self._stream = [draw.randrange(VOCAB) for _ in range((1 << _STREAM_BITS) + TOKENS)]

    def __getitem__(self, i: int) -> list[int]:
        at = i & self._mask
        return self._stream[at : at + TOKENS]
