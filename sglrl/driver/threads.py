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
    """Run work on text in a thread, for example tokenization.

    The event loop's own threads are not used. Agents may occupy all of them while they wait for
    turns, and the turns cannot end before this work is done.
    """
    return await asyncio.get_running_loop().run_in_executor(_pool(os.getpid()), work, *arguments)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process. A forked process needs its own, as it inherits none."""
    return ThreadPoolExecutor(thread_name_prefix="sglrl text")


async def from_thread(start: Callable[[Finish], None]) -> Exception | None:
    """Start a daemon thread, wait for its end, and return its error, if any.

    A daemon thread does not delay the exit of the program. The interpreter would wait for a thread
    of an executor.

    Args:
        start: starts the thread. At its end, the thread must call the argument of ``start`` once,
            with an error or None.
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
