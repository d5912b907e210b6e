"""Decide whether and when a lost worker is replaced.

Each worker has a budget of restarts within a period, like the supervisors of OTP
(https://www.erlang.org/doc/system/sup_princ.html, maximum restart intensity). A worker that exceeds
its budget is retired.

A worker that had served a call is replaced at once. If a worker fails repeatedly before it serves,
the delay between restarts grows, because faster failures gain nothing. More than ``restarts`` such
failures in a row also exceed the budget, even if they take longer than the period.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

FIRST_DELAY: Final = 0.5
MAX_DELAY: Final = 30.0


class Supervision:
    """The losses of one worker and of its replacements, which have the same index.

    Args:
        restarts: maximum number of replacements within ``period`` seconds. With 0, a lost worker
            is never replaced.
        period: the length of the period in seconds.
    """

    def __init__(self, restarts: int, period: float) -> None:
        self.restarts = restarts
        self.period = period
        self.reasons: Counter[str] = Counter()
        self.used_up = ""
        """The reason why the budget is exhausted, in words; "" while it is not exhausted."""
        self._detail = ""
        self._recent: deque[float] = deque()
        self._failures = 0

    def lost(self, reason: str, now: float, *, served: bool, detail: str = "") -> float | None:
        """Record a loss. Return the replacement's delay in seconds, or None to retire the worker.

        Args:
            reason: the reason for the loss, in words.
            now: the time in seconds on a monotonic clock.
            served: whether the worker had finished at least one call since its start.
            detail: the error that ended the worker, if it is known.
        """
        self._detail = detail or self._detail
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
        # The first failure in a row causes no delay.
        if self._failures < 2:
            return 0.0
        return float(min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(self._failures - 2, 60)))

    @property
    def history(self) -> str:
        """The number of losses, their reasons and the latest known error, in words."""
        parts = [
            f"{reason} ({n} times)" if n > 1 else reason
            for reason, n in self.reasons.most_common(4)
        ]
        total = sum(self.reasons.values())
        if self._detail:
            parts.append(f"the last error: {self._detail}")
        return f"lost {total} time{'s' if total > 1 else ''}: {'; '.join(parts)}"
