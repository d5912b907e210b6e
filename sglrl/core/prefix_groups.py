"""Requests that wait for one engine and begin alike: who should let another go before it.

An engine computes what a prompt shares with others once, and then has it in its prefix cache. But
those that it prefills in the same step find nothing there yet, and n samples of one prompt compute
it n times. If one of them goes first, the others need little more than their last token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from .prefixes import BEGINNINGS

LEAST: Final = 64
"""Tokens that a request must save if it is to wait for another's prefill."""


class Prompt:
    """The tokens of one request, as far as they may come from the prefix cache.

    Args:
        tokens: of a prompt, and what was sampled behind it if it is prefilled too.
        width: bytes of a token.
        most: tokens that may come from the cache, from the beginning on.
        kind: requests of different kinds share nothing, or do not wait for each other.
    """

    __slots__ = ("ends", "keys", "most")

    def __init__(self, tokens: bytes, width: int, most: int, kind: Hashable) -> None:
        self.most = most
        self.ends: list[int] = []
        """Lengths in tokens of the beginnings that are looked at; of the last one: all."""
        self.keys: list[int] = []
        """Of each, from all of its tokens. A collision costs one step's wait."""
        size = len(tokens) // width
        key, n, begin = hash(kind), 0, 0
        while (end := BEGINNINGS[n + 1] * LEAST) <= size:
            key = self._add(key, tokens, width, begin, end)
            begin = end
            n += 1
        if 0 < begin < size:
            self._add(key, tokens, width, begin, size)

    def _add(self, before: int, tokens: bytes, width: int, begin: int, end: int) -> int:
        key = hash((before, tokens[begin * width : end * width]))
        self.keys.append(key)
        self.ends.append(end)
        return key


def followers(
    begun: Sequence[Prompt], waiting: Sequence[Prompt], cached: Callable[[int], int]
) -> set[int]:
    """Which of the waiting requests should let another be prefilled before them.

    Args:
        begun: those that are being prefilled.
        waiting: in the order in which they are to be.
        cached: how many tokens of a request the cache has now. 0 is the first one that has begun,
            and those that wait are counted on behind them. Asked once at most, and only of one
            that another may wait for.

    Returns:
        indices into ``waiting``. Each shares ``LEAST`` tokens or more that are not in the cache yet
        with one that has begun, or comes before it and is not among them.
    """
    leaders: dict[int, int] = {}
    there: dict[int, int] = {}
    later: set[int] = set()
    for index, prompt in enumerate([*begun, *waiting]):
        for key, end in zip(reversed(prompt.keys), reversed(prompt.ends), strict=True):
            leader = leaders.get(key)
            if leader is None:
                continue
            if leader not in there:
                there[leader] = cached(leader)
            if index >= len(begun) and min(end, prompt.most) - there[leader] >= LEAST:
                later.add(index - len(begun))
            break
        # Who goes on from one that waits shares as much with whom that waits for.
        for key in prompt.keys:
            leaders.setdefault(key, index)
    return later
