"""Find waiting requests of one engine that should wait for another request's prefill.

An engine finds a shared prompt prefix in its prefix cache only after it has computed the prefix.
Requests that are prefilled in the same step do not find the prefix yet, so n samples of one prompt
compute the prefix n times. If one of these samples is prefilled first, the other samples compute
little more than their last token.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from .prefixes import BEGINNINGS

LEAST: Final = 64
"""Minimum number of tokens that a request must save to wait for another request's prefill."""


class Prompt:
    """The prefixes of one request that may come from the prefix cache.

    Args:
        tokens: the tokens of the prompt, and the sampled tokens after it if they are prefilled too.
        width: bytes per token.
        most: maximum number of tokens that may come from the cache, counted from the first token.
        kind: any value. Requests with different values do not wait for each other.
    """

    __slots__ = ("ends", "keys", "most")

    def __init__(self, tokens: bytes, width: int, most: int, kind: Hashable) -> None:
        self.most = most
        self.ends: list[int] = []
        """Lengths in tokens of the compared prefixes. The last prefix is the whole request."""
        self.keys: list[int] = []
        """One key per prefix, computed from all tokens of the prefix. If two keys collide, a
        request waits one step too long."""
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
    """Return the waiting requests that should wait for the prefill of another request.

    Args:
        begun: the requests that are being prefilled.
        waiting: the waiting requests, in the order of their prefill.
        cached: returns how many tokens of a request are in the cache now. Its argument is an index
            into ``[*begun, *waiting]``. It is called at most once per request, and only for
            requests for which another request may wait.

    Returns:
        indices into ``waiting``. Each of these requests shares a prefix with another request, and
        at least ``LEAST`` tokens of this prefix are not in the cache yet. The other request is in
        ``begun``, or is earlier in ``waiting`` and not returned.
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
        # This request becomes the leader for its keys without a leader, even if it must wait for
        # the prefill of a shorter prefix. A later request with one of these keys also has this
        # shorter prefix, so it must wait for the same prefill.
        for key in prompt.keys:
            leaders.setdefault(key, index)
    return later
