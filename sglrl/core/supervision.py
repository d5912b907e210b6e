"""Whether and when a lost worker is replaced.

Each worker has a budget of restarts within a period, as OTP's supervisors have
(https://www.erlang.org/doc/system/sup_princ.html, maximum restart intensity); one that uses it up
is retired. A worker that had served is replaced at once. One that fails again and again before it
serves is given more time between the tries, since nothing is gained by failing faster; and as many
such failures in a row use the budget up too, however long each takes.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

FIRST_DELAY: Final = 0.5
MOST_DELAY: Final = 30.0


class Supervision:
    """The losses of one worker index.

    Args:
        restarts: replacements within ``period`` seconds; 0: a lost worker is never replaced.
    """

    def __init__(self, restarts: int, period: float) -> None:
        self.restarts = restarts
        self.period = period
        self.reasons: Counter[str] = Counter()
        self.used_up = ""
        """What used the budget up, in words; empty while there is one."""
        self._recent: deque[float] = deque()
        self._failures = 0

    def lost(self, reason: str, now: float, *, served: bool) -> float | None:
        """Seconds until the replacement is to be started; None: retire the worker.

        Args:
            served: it had ended at least one call since it was started.
        """
        self.reasons[reason] += 1
        recent = self._recent
        while recent and recent[0] <= now - self.period:
            recent.popleft()
        self._failures = 0 if served else self._failures + 1
        if len(recent) >= self.restarts:
            restarts = "1 restart" if self.restarts == 1 else f"{self.restarts} restarts"
            self.used_up = f"no more than {restarts} in {self.period:g} s"
            return None
        if self._failures > self.restarts:
            self.used_up = f"the last {self._failures} ended before they had served a call"
            return None
        recent.append(now)
        # Once is no pattern.
        if self._failures < 2:
            return 0.0
        return float(min(MOST_DELAY, FIRST_DELAY * 2.0 ** min(self._failures - 2, 60)))

    @property
    def history(self) -> str:
        """How often it was lost, and of what."""
        parts = [
            f"{reason} ({n} times)" if n > 1 else reason
            for reason, n in self.reasons.most_common(4)
        ]
        total = sum(self.reasons.values())
        return f"lost {total} time{'s' if total > 1 else ''}: {'; '.join(parts)}"
