"""Measure an engine's speed: the duration of its steps, and the tokens that it generates."""

from __future__ import annotations

from collections import deque
from typing import Final

from sglrl.wire.engine import RATE_SECONDS

_STEPS: Final = 4
"""Number of steps over which the mean is smoothed."""
_LONGEST: Final = 0.1
"""Upper limit of ``StepClock.recent`` in seconds. A longer interval contains idle time."""
_SLICES: Final = 20
"""Number of parts of ``RATE_SECONDS``. ``TokenRate`` counts the tokens of one part together."""


class StepClock:
    """The mean and the shortest duration of steps.

    An engine whose steps block calls ``add``. An engine that launches steps ahead calls ``launch``
    and ``idle``.

    Attributes:
        mean: the mean duration of the latest steps in seconds, or 0 before the first step.
        shortest: the longer duration of two consecutive steps, minimised over all such pairs, in
            seconds. It is 0 before the second step. A single short step does not count, because an
            engine that launches steps ahead launches two at once after a pause.
        recent: the shorter of the last two intervals between launches, in seconds. The longer
            interval may contain a prefill. ``recent`` follows changes faster than ``mean``: steps
            take 1.5 times as long while weights are received.
    """

    def __init__(self) -> None:
        self.mean = self.shortest = self._last = 0.0
        self.recent = self._interval = self._launched = 0.0
        self._idle = True
        """Whether the engine has been idle since the last step was launched."""

    def idle(self) -> None:
        """Record that the engine has no step to launch."""
        self._idle = True

    def launch(self, now: float) -> None:
        """Record the launch of a step. This ends the previous step, unless the engine was idle.

        Args:
            now: time in seconds, on any monotonic clock.
        """
        seconds = now - self._launched
        if not self._idle:
            self.add(seconds)
        self._idle, self._launched = False, now
        interval = min(seconds, _LONGEST)
        self.recent, self._interval = min(interval, self._interval), interval

    def add(self, seconds: float) -> None:
        """Record one step."""
        self.mean += (seconds - self.mean) / (_STEPS if self.mean else 1)
        if self._last:
            longer = max(self._last, seconds)
            self.shortest = min(self.shortest or longer, longer)
        self._last = seconds


class TokenRate:
    """The tokens per second in the latest ``RATE_SECONDS`` seconds.

    Time in which the process does not run lowers the rate, too. A mean over the whole uptime would
    hide that an engine has stopped.

    Args:
        now: the time at which the engine was ready, in seconds on any monotonic clock. All other
            times are on the same clock.
    """

    def __init__(self, now: float) -> None:
        self._begun = now
        self._slices: deque[tuple[int, int]] = deque()
        """Serial number and tokens of each part of the time, in ascending order."""

    def add(self, tokens: int, now: float) -> None:
        """Record new tokens."""
        number = self._number(now)
        if self._slices and self._slices[-1][0] == number:
            tokens += self._slices.pop()[1]
        self._slices.append((number, tokens))
        self._forget(number)

    def per_second(self, now: float) -> float:
        """Return the rate. If the uptime is shorter than the window, use the uptime instead."""
        self._forget(self._number(now))
        seconds = min(RATE_SECONDS, now - self._begun)
        return sum(tokens for _, tokens in self._slices) / seconds if seconds > 0 else 0.0

    def _number(self, now: float) -> int:
        return int((now - self._begun) / RATE_SECONDS * _SLICES)

    def _forget(self, number: int) -> None:
        while self._slices and self._slices[0][0] <= number - _SLICES:
            self._slices.popleft()
