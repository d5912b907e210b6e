"""Measure an engine's speed: the duration of its steps, and the tokens that it generates."""

from __future__ import annotations

from collections import deque
from typing import Final

from sglrl.wire.engine import RATE_SECONDS

_STEPS: Final = 4
"""Number of steps in which the mean follows a change."""
_LONGEST: Final = 0.1
"""Seconds. Upper limit of ``StepClock.recent``: a longer time between launches was idle time."""
_SLICES: Final = 20
"""Parts of the window. The tokens of one part are counted together."""


class StepClock:
    """The mean and the shortest duration of steps.

    An engine whose steps block calls ``add``. An engine that launches steps ahead calls ``launch``
    and ``idle``.

    Attributes:
        mean: the mean duration of the latest steps in seconds; 0 before the first step.
        shortest: the smallest value that no step exceeded in two steps in a row; 0 before the
            second step. A single short step does not count: an engine that launches steps ahead
            launches two at once after a pause.
        recent: seconds between the last launches: the shorter one of the last two intervals,
            because one of the two may have been a prefill. While weights are received, steps take
            1.5 times as long.
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
        """Record the launch of a step. The step before it has ended, unless the engine was idle.

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

    Time in which the process does not run counts, too. A total over the whole uptime would hide
    that an engine has stopped.

    Args:
        now: time in seconds at which the engine was ready, on any monotonic clock. All other times
            are on the same clock.
    """

    def __init__(self, now: float) -> None:
        self._begun = now
        self._slices: deque[tuple[int, int]] = deque()
        """Number of a part of time, and its tokens. The numbers ascend."""

    def add(self, tokens: int, now: float) -> None:
        """Record new tokens."""
        number = self._number(now)
        if self._slices and self._slices[-1][0] == number:
            tokens += self._slices.pop()[1]
        self._slices.append((number, tokens))
        self._forget(number)

    def per_second(self, now: float) -> float:
        """Return the rate. An engine that is younger than the window has a shorter one."""
        self._forget(self._number(now))
        seconds = min(RATE_SECONDS, now - self._begun)
        return sum(tokens for _, tokens in self._slices) / seconds if seconds > 0 else 0.0

    def _number(self, now: float) -> int:
        return int((now - self._begun) / RATE_SECONDS * _SLICES)

    def _forget(self, number: int) -> None:
        while self._slices and self._slices[0][0] <= number - _SLICES:
            self._slices.popleft()
