"""Wait on an event loop for a thread that does not delay the exit of the program."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

Finish = Callable[[Exception | None], None]


async def from_thread(start: Callable[[Finish], None]) -> Exception | None:
    """Call ``start`` and return the error with which the thread calls its argument.

    The threads of an executor are not used: the interpreter waits for them when it exits.

    Args:
        start: starts a daemon thread, which calls the given function once: with an error or None.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Exception | None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if not found.done():
            found.set_result(error)

    def finish_soon(error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, error)

    start(finish_soon)
    return await found
