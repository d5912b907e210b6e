"""Failures of a run: how many there are of each kind, which are worth a line of the log, and when
there are too many.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import Final

LEAST_ATTEMPTS: Final = 64
"""Minimum number of finished attempts in the window of the failure rate."""
MOST_MESSAGES: Final = 10
"""Of one type and place. Errors with further messages are counted as one kind: messages may have
numbers in them that differ every time."""


class Kind:
    """Errors of one type, place and message. ``place``: the file and line that raised.
    ``message``: of the latest. ``logged``: the count when they were last logged."""

    __slots__ = ("count", "logged", "message", "name", "place")

    def __init__(self, name: str, place: str, message: str) -> None:
        self.name = name
        self.place = place
        self.message = message
        self.count = self.logged = 0

    def __repr__(self) -> str:
        return f"{self.name}: {self.message}"

    def is_due(self) -> bool:
        """Whether to log the latest of them: the first, the tenth, the hundredth, ... Answers True
        once for each count."""
        count = self.count
        while count >= 10 and count % 10 == 0:
            count //= 10
        if count != 1 or self.logged == self.count:
            return False
        self.logged = self.count
        return True


class Failures:
    """What became of the attempts of one run.

    Args:
        max_rate: the share of the latest attempts that may fail, in (0, 1]; None: all may.
    """

    def __init__(self, max_rate: float | None) -> None:
        self.max_rate = max_rate
        self.kinds: dict[tuple[str, str, str | None], Kind] = {}
        self._messages: dict[tuple[str, str], int] = {}
        """How many kinds there are of a type and place."""
        self._latest: deque[bool] = deque()
        """Whether each of the latest attempts failed."""
        self._failed = 0
        """How many of them."""

    def count(self, name: str, place: str, message: str) -> Kind:
        """An attempt has failed with this error. Its kind, which counts it."""
        key: tuple[str, str, str | None] = (name, place, message)
        kind = self.kinds.get(key)
        if kind is None:
            messages = self._messages.get((name, place), 0)
            if messages >= MOST_MESSAGES:
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
        """An attempt has finished.

        Args:
            concurrency: how many attempts may run at a time. The rate is of the last 4 times as
                many, and at least of ``LEAST_ATTEMPTS``: attempts that fail may take less time than
                those that do not.

        Returns:
            the share of the latest attempts that failed, if it is more than ``max_rate``.
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
        return max(LEAST_ATTEMPTS, 4 * concurrency)
