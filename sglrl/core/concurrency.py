"""Find the number of concurrent rollouts that just fills the engines.

The method is modelled on the additive increase and multiplicative decrease of TCP (V. Jacobson,
Congestion Avoidance and Control, SIGCOMM 1988). The counterpart of a lost packet is a preemption:
an engine removes a running request from its KV cache (SGLang: retraction) and repeats the work.

An engine is full before it preempts: requests wait in the engine, its KV cache is nearly full, or
its steps are slow. When the engines are full, the limit stops rising. More concurrent agents would
only make each agent slower, its tokens older, and its group later.

An agent loads the engines only some time after its start, so the limit may rise too far. The limit
then falls by the number of requests that waited during a whole interval, less a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..wire.calls import Load

FULL: Final = 0.9
"""Share of the KV cache in use from which an engine counts as full."""
SLOW: Final = 8.0
"""The engines are full when their steps take this many times their shortest step, on average.

A step takes a fixed time and a time for each request. At this factor, twice as many requests would
add 7 % to the tokens per second. At twice this factor, the limit falls.
"""
SHORTEST: Final = 0.005
"""Seconds. A shorter step counts as this long, because other programs may delay a step by as much
time."""
MARGIN: Final = 0.2
"""Number of requests that may wait, as a share of the limit. An engine can then start a waiting
request when another request ends. If more than twice this number wait, the limit falls."""
STEP: Final = 1.25
"""Growth factor of the limit after the engines have been full once."""
SLOW_START: Final = 2.0
"""Growth factor of the limit until the engines have once been full or half as slow as ``SLOW``."""
BACK_OFF: Final = 0.8
INTERVAL: Final = 0.25
"""Minimum seconds between two changes, because a change must take effect before the next change.
For the same reason, the engines compute at least one step for each agent between two changes. If
the last change was a rise, a preemption lowers the limit at once."""
STEPS: Final = 8
"""Minimum number of engine steps between two changes. A new request joins the next step, and
``step_seconds`` shows the effect of a change after some steps."""


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
        self._done = 0
        """The sum of the engines' ``Load.request_steps`` at the last decision."""
        self._spare = 1 << 30
        """Number of requests that have waited all the time since the last decision."""

    def observe_load(self, now: float, in_use: int, queued: int, loads: Sequence[Load]) -> bool:
        """Update the limit from the loads of the engines. Return True if the limit has changed.

        Args:
            now: seconds, monotonic.
            in_use: number of running agents. Without a preemption, the limit changes only if it
                equals this number.
            queued: number of calls that wait at the driver because the window of every engine is
                full.
        """
        preempted = sum(load.preempted for load in loads)
        # Preemptions before the first call of this method belong to an earlier run.
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
        interval = max(INTERVAL, *(STEPS * load.step_seconds for load in loads))
        if now - self._decided_at < interval or in_use != self.limit:
            # If fewer agents run, they need no higher limit. If more run, some must end first.
            return False
        done = sum(load.request_steps for load in loads)
        if done and self._done <= done < self._done + in_use:
            # New agents may still prepare their first turn, or wait for its prefill.
            return False
        self._done = done
        spare, self._spare = self._spare, 1 << 30
        slowness = sum(map(_slowness, loads)) / len(loads)
        if slowness >= SLOW / 2:
            self._growth = STEP
        full = all(load.kv_usage >= FULL or load.waiting > 0 for load in loads)
        if not (full or queued or slowness >= SLOW):
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

    def _set(self, limit: int, now: float, *, grown: bool) -> bool:
        self._decided_at = now
        self._grown = grown
        changed = limit != self.limit
        self.limit = limit
        return changed


def _slowness(load: Load) -> float:
    """Return the duration of the latest steps divided by the shortest duration; 0 if unknown."""
    return load.step_seconds / max(load.shortest_step, SHORTEST) if load.shortest_step else 0.0
