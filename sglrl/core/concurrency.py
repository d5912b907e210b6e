"""How many rollouts at a time: as many as keep the engines full, and no more.

Additive increase, multiplicative decrease, as TCP finds the room of a path (V. Jacobson, Congestion
Avoidance and Control, SIGCOMM 1988). What a lost packet is there, is here a running request that an
engine had to take out of its KV cache again (SGLang: retraction): work done twice. Before it comes
to that, requests wait at an engine, or its KV cache is nearly full: then there is enough, and more
agents at a time would only make every one of them slower, and its tokens older.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

FULL: Final = 0.9
"""KV usage from which on nothing is added."""
STEP: Final = 1.25
"""Growth while nothing holds it back."""
SLOW_START: Final = 2.0
"""Growth until the engines have been full once."""
BACK_OFF: Final = 0.8
INTERVAL: Final = 0.25
"""Seconds between two changes: what was changed must have shown before it is changed again."""


class Load(NamedTuple):
    """One engine. kv_usage: 0..1, or -1 when it does not say. waiting: requests that it has not
    begun to compute. preempted: requests taken out of its KV cache since it started."""

    kv_usage: float
    waiting: int
    preempted: int


class Concurrency:
    """The limit, between ``least`` and ``most``."""

    def __init__(self, least: int = 1, most: int = 1 << 20) -> None:
        self.least = least
        self.most = most
        self.limit = least
        self._grown = True
        self._growth = SLOW_START
        self._changed_at = float("-inf")
        self._preempted: int | None = None

    def look(self, now: float, in_use: int, queued: int, loads: Sequence[Load]) -> bool:
        """Take note of what the engines say; whether the limit is another one now.

        Args:
            now: seconds, monotonic.
            in_use: agents that are running: the limit grows only if it is what holds them back.
            queued: calls that wait at the driver, because every engine's window is full.
        """
        preempted = sum(load.preempted for load in loads)
        # What was preempted before the first look is of another run.
        before, self._preempted = self._preempted, preempted
        pressed = before is not None and preempted > before
        if pressed:
            if now - self._changed_at < INTERVAL and not self._grown:
                return False
            self._growth = STEP
            return self._set(max(self.least, int(self.limit * BACK_OFF)), now, grown=False)
        if now - self._changed_at < INTERVAL or in_use < self.limit or not loads:
            return False
        full = queued > 0 or all(load.kv_usage >= FULL or load.waiting > 0 for load in loads)
        if full:
            self._growth = STEP
            return False
        return self._set(min(self.most, int(self.limit * self._growth) + 1), now, grown=True)

    def _set(self, limit: int, now: float, *, grown: bool) -> bool:
        self._changed_at = now
        self._grown = grown
        changed = limit != self.limit
        self.limit = limit
        return changed
