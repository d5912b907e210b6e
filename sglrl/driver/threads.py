"""Threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar, TypeVarTuple

Finish = Callable[[Exception | None], None]
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def in_thread(work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
    """Render, tokenize or parse in a thread.

    The event loop's own threads may all be taken by agents that block until they get a turn, and
    the turn needs this work.
    """
    return await asyncio.get_running_loop().run_in_executor(_pool(os.getpid()), work, *arguments)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process. A fork does not have those of its parent."""
    return ThreadPoolExecutor(thread_name_prefix="sglrl text")


async def from_thread(start: Callable[[Finish], None]) -> Exception | None:
    """Wait for a thread that does not delay the exit of the program.

    Call ``start``, and return the error with which the thread calls its argument.

    The threads of an executor are not used: the interpreter waits for them when it exits.

    Args:
        start: starts a daemon thread, which calls the given function once: with an error or None.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Exception | None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(error)

    def finish_soon(error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, error)

    start(finish_soon)
    return await ended
