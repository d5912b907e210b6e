"""Count the failures of a run by kind. Decide which failures to log, and when a run has too many.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import Final

MIN_ATTEMPTS: Final = 64
"""Minimum number of finished attempts in the window of the failure rate."""
MAX_MESSAGES: Final = 10
"""Maximum number of messages of one error type and place that each have their own kind. All other
messages share one more kind, because a message may contain a number that differs every time."""


class Kind:
    """Errors of one type, place and message.

    Attributes:
        count: number of errors of this kind.
        name: the type of the errors.
        place: the file and line that raised the errors.
        message: the message of the latest error.
        logged: the count when an error of this kind was last logged.
    """

    __slots__ = ("count", "logged", "message", "name", "place")

    def __init__(self, name: str, place: str, message: str) -> None:
        self.name = name
        self.place = place
        self.message = message
        self.count = self.logged = 0

    def __repr__(self) -> str:
        return f"{self.name}: {self.message}"

    def is_due(self) -> bool:
        """Return True if the latest error is to be logged.

        This is the case for the first, the tenth, the hundredth error, and so on. The result is
        True only once for each of these errors.
        """
        count = self.count
        while count >= 10 and count % 10 == 0:
            count //= 10
        if count != 1 or self.logged == self.count:
            return False
        self.logged = self.count
        return True


class Failures:
    """The failures and the failure rate of one run.

    Args:
        max_rate: the share of the latest attempts that may fail, in (0, 1], or None for no limit.
    """

    def __init__(self, max_rate: float | None) -> None:
        self.max_rate = max_rate
        self.kinds: dict[tuple[str, str, str | None], Kind] = {}
        self._messages: dict[tuple[str, str], int] = {}
        """Number of kinds by error type and place."""
        self._latest: deque[bool] = deque()
        """For each of the latest attempts, whether it failed."""
        self._failed = 0
        """Number of failed attempts in ``_latest``."""

    def count(self, name: str, place: str, message: str) -> Kind:
        """Count a failed attempt. Return the kind of its error."""
        key: tuple[str, str, str | None] = (name, place, message)
        kind = self.kinds.get(key)
        if kind is None:
            messages = self._messages.get((name, place), 0)
            if messages >= MAX_MESSAGES:
                key = (name, place, None)
                kind = self.kinds.get(key)
            else:
                self._messages[name, place] = messages + 1
            if kind is None:
                kind = self.kinds[key] = Kind(name, place, message)
        kind.count += 1
        kind.message = message
        return kind

    def most_frequent(self) -> Kind | None:
        return max(self.kinds.values(), key=lambda kind: kind.count, default=None)

    def attempt(self, failed: bool, concurrency: int) -> float | None:
        """Record a finished attempt.

        Args:
            failed: whether the attempt failed.
            concurrency: how many attempts may run at the same time. The rate covers the latest
                ``4 * concurrency`` attempts, and at least ``MIN_ATTEMPTS``, because failed
                attempts may take less time than successful ones.

        Returns:
            the share of the latest attempts that failed, if it exceeds ``max_rate``. None if it
            does not, or if there were too few attempts.
        """
        if self.max_rate is None:
            return None
        latest = self._latest
        latest.append(failed)
        self._failed += failed
        size = self.window(concurrency)
        while len(latest) > size:
            self._failed -= latest.popleft()
        rate = self._failed / size
        return rate if len(latest) == size and rate > self.max_rate else None

    @staticmethod
    def window(concurrency: int) -> int:
        return max(MIN_ATTEMPTS, 4 * concurrency)
