"""A queue of weight and sleep commands from any thread to the scheduler's loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from .commands import SleepCommand, WeightCommand

_LAUNCH_SECONDS = 0.0015
"""Upper bound in seconds of the time to launch a step on the GPU."""
_REST_SECONDS = 0.006
"""Maximum seconds that the GPU idles to let new weights become live before the next step."""
_COMMIT_SECONDS = 0.0015
"""Seconds from the arrival of the last weights to the command that applies them.

If the command is late, the loop waits this long once more.
"""


class WeightCommands:
    """The commands that the scheduler has not executed, in order. True if there are any.

    Args:
        wake: ends the wait of the scheduler's loop. Any thread may call it.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._commands: deque[WeightCommand | SleepCommand] = deque()
        self._expected = threading.Event()
        self._arrived = threading.Event()
        self._due: float | None = None
        """The ``time.monotonic`` at which the command is expected. None: do not idle the GPU."""

    def __bool__(self) -> bool:
        return bool(self._commands)

    def put(self, command: WeightCommand | SleepCommand) -> None:
        """Add a command. Any thread may call this."""
        self._commands.append(command)
        self._arrived.set()
        self._wake()

    def pop(self) -> WeightCommand | SleepCommand:
        """Return the next command."""
        return self._commands.popleft()

    def expect(self, seconds: float | None) -> None:
        """Expect a command within about one step. Any thread may call this.

        Args:
            seconds: the time until all weights have arrived. None if the GPU must then copy them
                to make them live.
        """
        self._arrived.clear()
        self._due = None if seconds is None else time.monotonic() + seconds + _COMMIT_SECONDS
        self._expected.set()

    def expect_none(self) -> None:
        """End the wait for an expected command. Any thread may call this."""
        self._expected.clear()

    def await_expected(self, scheduler: Any) -> None:
        """Delay the next launch while an expected command is about to arrive.

        With overlap, the scheduler launches a step while the GPU still runs the previous step. New
        weights become live only after the launched steps. So the scheduler launches the next step
        as late as the GPU allows.

        The scheduler delays the launch further if the command will arrive soon and makes the
        weights live without work for the GPU. This happens once for each update.
        """
        if not self._expected.is_set():
            return
        if scheduler.enable_overlap and scheduler.last_batch is not None:
            self._arrived.wait(max(0.0, scheduler.sglrl_steps.recent - _LAUNCH_SECONDS))
            due, now = self._due, time.monotonic()
            if due is not None and due - now < _REST_SECONDS and not self._arrived.is_set():
                self._due = None
                assert scheduler.sglrl_weights is not None
                scheduler.sglrl_weights.rest()
                self._arrived.wait(max(0.0, due - now) + _COMMIT_SECONDS)
        if self._arrived.is_set():
            self._expected.clear()
