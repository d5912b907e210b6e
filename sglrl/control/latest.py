"""Keep the latest values of a kind, but only while somebody asks for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from ..driver.driver import now

_One = TypeVar("_One")
WATCHED_SECONDS: Final = 60.0
"""Seconds after a question for which somebody counts as watching."""


class Latest(Generic[_One]):
    """The latest values, each with a number. Nothing is kept while nobody asks.

    Args:
        count: the largest number of values to keep.
    """

    def __init__(self, count: int) -> None:
        self._values: deque[_One] = deque(maxlen=count)
        self._next = 0
        """The number of the next value."""
        self._changed = asyncio.Event()
        self._end: asyncio.TimerHandle | None = None

    def add(self, make: Callable[[], _One]) -> None:
        """Keep a value, which is made only if somebody watches."""
        if self._end is not None:
            self._values.append(make())
            self._next += 1
            self._changed.set()

    async def after(self, number: int | None, seconds: float, most: int) -> tuple[int, list[_One]]:
        """Return the values from a number on, oldest first, and the number that follows them.

        Values that are no longer kept are left out.

        Args:
            number: the number that the previous call returned. 0: all kept values. None: only
                values from now on.
            seconds: the longest time to wait for a value.
            most: the largest number of values to return.
        """
        self._watch()
        number = self._next if number is None else number
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while number >= self._next:
                    self._changed.clear()
                    await self._changed.wait()
        self._watch()
        number = min(max(number, self._next - len(self._values)), self._next)
        start = number - (self._next - len(self._values))
        values = [self._values[at] for at in range(start, len(self._values))][:most]
        return number + len(values), values

    def _watch(self) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(WATCHED_SECONDS, self._forget)

    def _forget(self) -> None:
        self._end = None
        self._values.clear()


class Watch:
    """Wakes those who watch something, and says whether anybody does."""

    def __init__(self) -> None:
        self._until = 0.0
        self._changed = asyncio.Event()

    @property
    def active(self) -> bool:
        """Whether somebody has asked within the last seconds."""
        return now() < self._until

    def begin(self) -> None:
        """Count as watched from now on, for ``WATCHED_SECONDS``."""
        self._until = now() + WATCHED_SECONDS

    def tell(self) -> None:
        """Wake those who wait."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait for ``tell``."""
        self._changed.clear()
        await self._changed.wait()
