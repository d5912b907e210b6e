"""A gate at which turns wait while a run is paused."""

from __future__ import annotations

import asyncio
from typing import Protocol


class TimeLimit(Protocol):
    """The time limit of a task, with the methods of ``asyncio.Timeout`` that ``Gate`` calls."""

    def when(self) -> float | None: ...

    def reschedule(self, when: float | None) -> None: ...


class Gate:
    """A gate that turns pass while it is open. ``inside`` is the number of running turns."""

    def __init__(self) -> None:
        self.inside = 0
        self.opening: asyncio.Future[None] | None = None
        """A future that is done when the gate opens, or None while the gate is open.

        All waiting turns share the future, so none of them may cancel it. A turn that has waited
        for the future must increment ``inside`` before its next ``await``.
        """
        self._empty: asyncio.Future[None] | None = None

    async def wait(self, limit: TimeLimit | None, closed: asyncio.Future[None]) -> None:
        """Wait until the gate is open, or ``closed`` is done.

        Args:
            limit: the time limit of the task. The time of this wait does not count.
        """
        clock = asyncio.get_running_loop().time
        until = None if limit is None else limit.when()
        left = None if until is None else until - clock()
        stopped = limit if left is not None and left > 0 else None
        if stopped is not None:
            stopped.reschedule(None)
        try:
            while (opening := self.opening) is not None and not closed.done():
                await asyncio.wait((opening, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if stopped is not None and left is not None and not closed.done():
                stopped.reschedule(clock() + left)

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
            True, or False if the gate opens before all turns have left.
        """
        while self.inside and self.opening is not None:
            if self._empty is None:
                self._empty = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._empty)
        return self.opening is not None
