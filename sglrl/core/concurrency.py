"""Find the number of concurrent rollouts that just fills the engines.

The method is modelled on the additive increase and multiplicative decrease of TCP (V. Jacobson,
Congestion Avoidance and Control, SIGCOMM 1988). The counterpart of a lost packet is a preemption:
an engine removes a running request from its KV cache (SGLang: retraction) and repeats the work.

Before preemptions occur, an engine is full: requests wait there, its KV cache is nearly full, or
its steps are slow. Then the limit stops rising. More concurrent agents would only make each agent
slower, its tokens older, and its group later.

Agents load the engines some time after they start, so the limit may rise too far. It falls by the
requests that did not run during a whole interval, except a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

FULL: Final = 0.9
"""KV usage from which an engine counts as full."""
SLOW: Final = 10.0
"""An engine counts as full when its steps take this many times its shortest step.

A step takes a fixed time and a time for each request. At this factor, twice as many requests would
add 5 % to the tokens per second. At twice this factor, the limit falls.
"""
SHORTEST: Final = 0.001
"""Seconds. A step that is shorter counts as this long: its duration is mostly noise."""
MARGIN: Final = 0.2
"""Share of the agents whose requests may wait, so that an engine finds one when another ends. If
twice as many wait, the limit falls."""
STEP: Final = 1.25
"""Growth factor of the limit after the engines have been full once."""
SLOW_START: Final = 2.0
"""Growth factor of the limit until the engines have been full once, or are half as slow as that."""
BACK_OFF: Final = 0.8
INTERVAL: Final = 0.25
"""Seconds between two changes. A change must take effect before the next change, so an interval is
at least twice as long as the engines' steps."""


class Load(NamedTuple):
    """The load of one engine.

    Attributes:
        kv_usage: 0..1, or -1 if the engine does not report it.
        waiting: number of requests that the engine has not begun to compute.
        preempted: number of requests removed from the KV cache since the start of the engine.
        step_seconds: duration of its latest steps, or 0 if it is not known.
    """

    kv_usage: float
    waiting: int = 0
    preempted: int = 0
    step_seconds: float = 0.0


class Concurrency:
    """The limit of concurrent agents, between ``least`` and ``most``."""

    def __init__(self, least: int = 1, most: int = 1 << 20) -> None:
        self.least = least
        self.most = most
        self.limit = least
        self._grown = True
        self._growth = SLOW_START
        self._decided_at = float("-inf")
        self._preempted: int | None = None
        self._shortest = float("inf")
        """The shortest step of any engine."""
        self._spare = 1 << 30
        """Number of requests that have waited all the time since the last decision."""

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
            if now - self._decided_at < INTERVAL and not self._grown:
                return False
            self._growth = STEP
            return self._set(max(self.least, int(self.limit * BACK_OFF)), now, grown=False)
        if not loads:
            return False
        self._spare = min(self._spare, queued + len(loads) * min(load.waiting for load in loads))
        steps = [max(load.step_seconds, SHORTEST) for load in loads if load.step_seconds]
        self._shortest = min([self._shortest, *steps])
        interval = max([INTERVAL, *(2 * seconds for seconds in steps)])
        if now - self._decided_at < interval or in_use != self.limit:
            # Agents below the limit need no higher one. Agents above it must end first.
            return False
        spare, self._spare = self._spare, 1 << 30
        slowness = min(load.step_seconds for load in loads) / self._shortest
        if slowness >= SLOW / 2:
            self._growth = STEP
        if not (queued or all(self._is_full(load) for load in loads)):
            return self._set(min(self.most, int(self.limit * self._growth) + 1), now, grown=True)
        self._growth = STEP
        self._decided_at = now
        margin = int(self.limit * MARGIN)
        if slowness >= 2 * SLOW:
            lower = int(self.limit * BACK_OFF)
        elif spare > 2 * margin:
            lower = self.limit - spare + margin
        else:
            return False
        return self._set(max(self.least, lower), now, grown=False)

    def _is_full(self, load: Load) -> bool:
        slow = load.step_seconds >= SLOW * self._shortest
        return load.kv_usage >= FULL or load.waiting > 0 or slow

    def _set(self, limit: int, now: float, *, grown: bool) -> bool:
        self._decided_at = now
        self._grown = grown
        changed = limit != self.limit
        self.limit = limit
        return changed
