"""Measure the duration of an engine's steps."""

from __future__ import annotations

from typing import Final

_STEPS: Final = 4
"""Number of steps in which the mean follows a change."""


class StepClock:
    """The mean and the shortest duration of steps.

    Attributes:
        mean: of the latest steps in seconds; 0 before the first step.
        shortest: the smallest value that no step exceeded in two steps in a row; 0 before the
            second step. A single short step does not count: an engine that launches steps ahead
            launches two at once after a pause.
    """

    def __init__(self) -> None:
        self.mean = self.shortest = self._last = 0.0

    def add(self, seconds: float) -> None:
        """Record one step."""
        self.mean += (seconds - self.mean) / (_STEPS if self.mean else 1)
        if self._last:
            longer = max(self._last, seconds)
            self.shortest = min(self.shortest or longer, longer)
        self._last = seconds
