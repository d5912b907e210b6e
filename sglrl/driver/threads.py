"""Threads for work with text, which would block the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar, TypeVarTuple

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
