"""A gate at which turns wait while a run is paused."""

from __future__ import annotations

import asyncio
from typing import Protocol


class TimeLimit(Protocol):
    """The time limit of a task, as ``asyncio.timeout``. Its clock stops while a run is paused."""

    def when(self) -> float | None: ...

    def reschedule(self, when: float | None) -> None: ...


class Gate:
    """A gate that is open or closed, and counts the turns ``inside``."""

    def __init__(self) -> None:
        self.inside = 0
        self.opening: asyncio.Future[None] | None = None
        """While the gate is closed: a future that is done when the gate opens; otherwise None.

        Wait for it without cancelling it. A turn that enters afterwards increments ``inside`` at
        once.
        """
        self._empty: asyncio.Future[None] | None = None

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside and self._empty is not None:
            self._empty.set_result(None)
            self._empty = None

    def close(self) -> None:
        """Close the gate. Turns inside continue; no new turn begins."""
        if self.opening is None:
            self.opening = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        if self.opening is not None:
            self.opening.set_result(None)
            self.opening = None
        if self._empty is not None:
            self._empty.set_result(None)
            self._empty = None

    async def empty(self) -> bool:
        """Wait until no turn is inside.

        Returns:
            False if the gate was opened before that.
        """
        while self.inside and self.opening is not None:
            if self._empty is None:
                self._empty = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._empty)
        return self.opening is not None
