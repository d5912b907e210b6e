"""Decide which workers hang: they hold calls and make no progress.

A heartbeat reports the progress of a worker's loop, and its phase, which explains why the loop may
make no progress. A worker can hang in two ways. For each way there is a clock, which runs only
while the worker holds calls:

* No heartbeat arrives: the process is stopped, or computes without letting another thread run.
* Heartbeats arrive and report the same progress. In phase ``WEIGHTS`` this is allowed because the
  weight channel has its own deadlines, and in ``PAUSED`` because the user asked for the pause. In
  ``PREFILL`` it is allowed for ``PREFILL_TIMES`` times ``timeout``.

While the driver itself is stopped or busy, no clock runs. After that, no worker counts as hung
before the driver has had time to read the messages that arrived in the meantime.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFILL: Final = "prefill"
WEIGHTS: Final = "weights"
PAUSED: Final = "paused"
PREFILL_TIMES: Final = 10


class _Watched:
    """The state of one worker.

    Both clocks start anew when a check finds calls at a worker that held none at the last check.

    Attributes:
        heard: time of the last heartbeat, or of the start of the clock if that is later.
        moved: time of the last heartbeat that reported new progress or the phase ``WEIGHTS`` or
            ``PAUSED``, or of the start of the clock if that is later.
    """

    __slots__ = ("heard", "holds_calls", "moved", "phase", "progress")

    def __init__(self, now: float) -> None:
        self.heard = self.moved = now
        self.holds_calls = False
        self.progress = -1
        self.phase = ""


class HangDetector:
    """Finds workers that hang.

    Call ``check`` every ``interval`` seconds, which is also the interval of heartbeats. ``timeout``
    and every ``now`` are in seconds.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self.timeout = timeout
        self.interval = interval_of(timeout)
        self._checked = now
        self._workers: dict[int, _Watched] = {}

    def watch(self, worker: int, now: float) -> None:
        """Watch a worker, or the new process of a worker."""
        self._workers[worker] = _Watched(now)

    def heartbeat(self, worker: int, progress: int, phase: str, now: float) -> None:
        """Record a heartbeat."""
        watched = self._workers.get(worker)
        if watched is None:
            return
        watched.heard = now
        if progress != watched.progress or phase in (WEIGHTS, PAUSED):
            watched.moved = now
        watched.progress = progress
        watched.phase = phase

    def silence(self, worker: int, now: float) -> float | None:
        """Return the seconds since a worker's last heartbeat, or since its clock has started.

        None if the worker is not watched.
        """
        watched = self._workers.get(worker)
        return None if watched is None else now - watched.heard

    def check(self, loads: Mapping[int, int], now: float) -> dict[int, str]:
        """Return the workers that hang, with the reason, and stop watching them.

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
                    hung[worker] = f"no heartbeat for {now - watched.heard:.3g} s with {calls}"
                elif now - watched.moved >= allowed:
                    hung[worker] = f"no progress for {now - watched.moved:.3g} s with {calls}"
        for worker in hung:
            del self._workers[worker]
        return hung


def interval_of(timeout: float) -> float:
    """Return the seconds between heartbeats and between checks, for this ``timeout``."""
    return min(1.0, timeout / 5)
