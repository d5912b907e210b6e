"""The deadline of one call, and a lock whose wait ends at the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator

from ..errors import UpdateInProgress


class Deadline:
    """The time at which a caller's timeout ends.

    Args:
        seconds: the timeout. None for no limit.
        begun: the time of the call, on ``time.perf_counter``. None for the current time.
    """

    def __init__(self, seconds: float | None, begun: float | None = None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._begun = time.perf_counter() if begun is None else begun

    @property
    def left(self) -> float:
        """Return the seconds until the deadline, at least 0. Infinity if there is no limit."""
        return max(0.0, self.seconds - (time.perf_counter() - self._begun))

    def limit(self) -> asyncio.Timeout:
        """Return a context that raises ``TimeoutError`` when the deadline passes.

        A block that does not have to wait is not interrupted, even if the deadline has already
        passed.
        """
        return asyncio.timeout(None if self.seconds == math.inf else self.left)

    def __str__(self) -> str:
        return f"{round(self.seconds, 3):g} s"


@contextlib.asynccontextmanager
async def turn(lock: asyncio.Lock, deadline: Deadline, *, wait: bool = True) -> AsyncIterator[None]:
    """Hold the lock of the weights within the block.

    Args:
        wait: whether to wait for the lock. False raises at once if another call holds the lock.

    Raises:
        UpdateInProgress: another call held the lock until the deadline, or ``wait`` is False and
            another call holds the lock.
    """
    try:
        async with deadline.limit() if wait else asyncio.timeout(0):
            await lock.acquire()
    except TimeoutError:
        late = f"and did not end within {deadline} (timeout)" if wait else "and wait is False"
        raise UpdateInProgress(
            f"another weight update or weight copy is running {late}; nothing has begun, so call "
            "again later"
        ) from None
    try:
        yield
    finally:
        lock.release()
