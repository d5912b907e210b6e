"""Where turns wait while a run is paused."""

from __future__ import annotations

import asyncio


class Gate:
    """Open or ``closed``; knows how many turns are ``inside``."""

    def __init__(self) -> None:
        self.inside = 0
        self.closed = False
        self._open: asyncio.Future[None] | None = None
        self._empty: asyncio.Future[None] | None = None

    @property
    def opening(self) -> asyncio.Future[None] | None:
        """Done when the gate is opened, to be waited for and not cancelled; None: it is open. Who
        goes inside adds to ``inside`` at once."""
        return self._open

    def leave(self) -> None:
        self.inside -= 1
        if not self.inside and self._empty is not None:
            self._empty.set_result(None)
            self._empty = None

    def close(self) -> None:
        """Turns that have begun go on; no other begins."""
        self.closed = True
        if self._open is None:
            self._open = asyncio.get_running_loop().create_future()

    def open(self) -> None:
        self.closed = False
        if self._open is not None:
            self._open.set_result(None)
            self._open = None
        if self._empty is not None:
            self._empty.set_result(None)
            self._empty = None

    async def empty(self) -> bool:
        """Wait until no turn is inside. False: it was opened before that."""
        while self.inside and self.closed:
            if self._empty is None:
                self._empty = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._empty)
        return self.closed
