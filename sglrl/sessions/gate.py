"""Where turns wait while a run is paused."""

from __future__ import annotations

import asyncio


class Gate:
    """Open or closed; knows how many turns are ``inside``."""

    def __init__(self) -> None:
        self.inside = 0
        self.opening: asyncio.Future[None] | None = None
        """Of a closed one: done when it is opened, to be waited for and not cancelled. Who then
        goes inside adds to ``inside`` at once."""
        self._empty: asyncio.Future[None] | None = None

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside and self._empty is not None:
            self._empty.set_result(None)
            self._empty = None

    def close(self) -> None:
        """Turns that have begun go on; no other begins."""
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
        """Wait until no turn is inside. False: it was opened before that."""
        while self.inside and self.opening is not None:
            if self._empty is None:
                self._empty = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._empty)
        return self.opening is not None
