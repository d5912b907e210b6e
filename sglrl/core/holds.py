"""Keep and report the reasons for which workers hold back calls, for example sleeping engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .calls import Call

PATIENCE: Final = 5.0
"""Seconds that a call waits before the reason is reported."""


class Holds:
    """The reasons for which workers hold back calls, by the part of the pool that sets the reason.

    The error of a call whose deadline has passed contains the reasons. Each part is reported once,
    when a call has waited for some seconds.

    Attributes:
        due: the time at which ``report`` must be called next, or None.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._reported: set[str] = set()
        self.due: float | None = None

    def __str__(self) -> str:
        return "; ".join(self.reasons.values())

    def set(self, part: str, reason: str | None, now: float) -> None:
        """Set the reason of a part of the pool.

        Args:
            part: the name of the part.
            reason: the reason, with a hint what to do. None: the part does not hold back calls.
        """
        if reason is None:
            self.reasons.pop(part, None)
        else:
            self.reasons[part] = reason
        self.waiting(now)

    def waiting(self, now: float) -> None:
        """Schedule a report if needed, because a call may wait from now on."""
        if self.due is None and self.reasons.keys() - self._reported:
            self.due = now + PATIENCE

    def report(self, calls: Iterable[Call], now: float) -> str:
        """Return the reasons that must be reported now; "" if there are none.

        Args:
            calls: the live calls.
        """
        if self.due is None or now < self.due:
            return ""
        self.due = None
        begun = min((c.submitted_at for c in calls if not c.urgent), default=None)
        if begun is None:
            return ""
        if now < begun + PATIENCE:
            self.due = begun + PATIENCE
            return ""
        parts = [part for part in self.reasons if part not in self._reported]
        self._reported.update(parts)
        return "; ".join(self.reasons[part] for part in parts)
