"""Find the number of concurrent rollouts that just fills the engines.

The method is modelled on the additive increase and multiplicative decrease of TCP (V. Jacobson,
Congestion Avoidance and Control, SIGCOMM 1988). The counterpart of a lost packet is a preemption:
an engine removes a running request from its KV cache (SGLang: retraction) and repeats the work.

Before preemptions occur, requests wait at an engine or its KV cache is nearly full. Then the limit
stops rising: more concurrent agents would only make each agent slower and its tokens older.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

FULL: Final = 0.9
"""KV usage from which an engine counts as full."""
STEP: Final = 1.25
"""Growth factor of the limit after the engines have been full once."""
SLOW_START: Final = 2.0
"""Growth factor of the limit until the engines have been full once."""
BACK_OFF: Final = 0.8
INTERVAL: Final = 0.25
"""Seconds between two changes. A change must take effect before the next change."""


class Load(NamedTuple):
    """The load of one engine.

    Attributes:
        kv_usage: 0..1, or -1 if the engine does not report it.
        waiting: number of requests that the engine has not begun to compute.
        preempted: number of requests removed from the KV cache since the start of the engine.
    """

    kv_usage: float
    waiting: int
    preempted: int


class Concurrency:
    """The limit of concurrent agents, between ``least`` and ``most``."""

    def __init__(self, least: int = 1, most: int = 1 << 20) -> None:
        self.least = least
        self.most = most
        self.limit = least
        self._grown = True
        self._growth = SLOW_START
        self._changed_at = float("-inf")
        self._preempted: int | None = None

    def look(self, now: float, in_use: int, queued: int, loads: Sequence[Load]) -> bool:
        """Update the limit from the loads of the engines. Return True if the limit has changed.

        Args:
            now: seconds, monotonic.
            in_use: number of running agents. The limit grows only if they reach it.
            queued: number of calls that wait at the driver because the window of every engine is
                full.
        """
        preempted = sum(load.preempted for load in loads)
        # Preemptions before the first call belong to an earlier run.
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
