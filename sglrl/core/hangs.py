"""Which workers hang: nothing comes of the calls that they hold.

A beat is what a thread of the worker says at regular intervals: how far the worker's loop has
come, and perhaps why it cannot be expected to come further (its phase). So there are two ways to
hang, and each has its clock, which runs only while the worker holds calls:

* no beat is heard: the process is stopped, or computes without letting any other thread run;
* beats are heard, and all say the same. In ``WEIGHTS`` that is as it should be, because the weight
  channel has deadlines of its own, and in ``PAUSED``, because that is what was asked for; in
  ``PREFILL`` it may take ``PREFILL_TIMES`` as long.

What the driver does not see is nobody's fault: while it was itself stopped or busy, no clock runs,
and after that it blames nobody before it has had time to read what had come meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFILL: Final = "prefill"
WEIGHTS: Final = "weights"
PAUSED: Final = "paused"
PREFILL_TIMES: Final = 10


class _Watched:
    """``heard``: the last beat; ``moved``: the last one that told of progress, or of ``WEIGHTS``
    or ``PAUSED``. Neither is earlier than when the worker was first seen to hold the calls that it
    holds."""

    __slots__ = ("heard", "holds_calls", "moved", "phase", "progress")

    def __init__(self, now: float) -> None:
        self.heard = self.moved = now
        self.holds_calls = False
        self.progress = -1
        self.phase = ""


class HangDetector:
    """``timeout``, and every ``now``, is in seconds. ``check`` is to be called every ``interval``,
    which is also how often a worker is to beat."""

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self.interval = interval_of(timeout)
        self._checked = now
        self._workers: dict[int, _Watched] = {}

    def watch(self, worker: int, now: float) -> None:
        """From now on; afresh, if another process had this number."""
        self._workers[worker] = _Watched(now)

    def beat(self, worker: int, progress: int, phase: str, now: float) -> None:
        watched = self._workers.get(worker)
        if watched is None:
            return
        watched.heard = now
        if progress != watched.progress or phase in (WEIGHTS, PAUSED):
            watched.moved = now
        watched.progress = progress
        watched.phase = phase

    def check(self, loads: Mapping[int, int], now: float) -> dict[int, str]:
        """The workers that hang, with why; they are not watched any more.

        Args:
            loads: how many calls each worker holds.
        """
        away = now - self._checked
        late = away > 2 * self.interval
        self._checked = now
        hung: dict[int, str] = {}
        for worker, watched in self._workers.items():
            load = loads.get(worker, 0)
            if not load:
                watched.holds_calls = False
            elif not watched.holds_calls:
                watched.holds_calls = True
                watched.heard = watched.moved = now
            elif late:
                watched.heard = min(now, watched.heard + away)
                watched.moved = min(now, watched.moved + away)
            else:
                allowed = self.timeout * (PREFILL_TIMES if watched.phase == PREFILL else 1)
                calls = f"{load} {'call' if load == 1 else 'calls'} pending"
                if now - watched.heard >= self.timeout:
                    hung[worker] = f"not heard of for {now - watched.heard:.3g} s with {calls}"
                elif now - watched.moved >= allowed:
                    hung[worker] = f"no progress for {now - watched.moved:.3g} s with {calls}"
        for worker in hung:
            del self._workers[worker]
        return hung


def interval_of(timeout: float) -> float:
    """Seconds between beats, and between checks, where hangs of ``timeout`` seconds are found."""
    return min(1.0, timeout / 5)
