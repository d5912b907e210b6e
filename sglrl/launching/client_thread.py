"""The thread that runs the event loop of a client for synchronous callers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import uvloop

from ..client.client import Client
from ..rollouts.run import Rollout

logger = logging.getLogger("sglrl.blocking")

_T = TypeVar("_T")

_LONGEST_END: Final = 10.0
"""Seconds within which cancelled tasks must finish when the client is closed. The thread must
finish within the same time at interpreter exit."""


class ClientThread(threading.Thread):
    """Runs the loop of a client until ``end`` is called, and then closes the client.

    At interpreter exit, the thread also ends if its client was never closed. If the thread still
    ran, uvloop would run the loop's timers after the interpreter is finalized, which crashes the
    process with SIGSEGV.

    Args:
        client: the client whose event loop this thread runs.
        runs: the rollouts that were entered and are not closed. The thread closes them.

    Attributes:
        loop: the event loop. The thread closes it.
    """

    def __init__(self, client: Client, runs: set[Rollout]) -> None:
        super().__init__(name="sglrl-blocking", daemon=True)
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._client = client
        self._runs = runs
        self._ended = asyncio.Event()

    def run(self) -> None:
        """Run the loop, then cancel its remaining tasks."""
        # This finalizer refers to the thread, so it runs only at interpreter exit. Finalizers that
        # were registered later run first. One of these may close the client for its owner.
        at_exit = weakref.finalize(self, self._end_at_exit)
        try:
            try:
                self.loop.run_until_complete(self._serve())
            finally:
                self.loop.run_until_complete(_cancel_all(self.loop))
        finally:
            self.loop.close()
            at_exit.detach()

    async def _serve(self) -> None:
        await self._ended.wait()
        # If the client is closed already, this does nothing.
        await self.close_client()

    async def close_client(self, **kwargs: Any) -> None:
        """Close the client and the rollouts. Runs on the loop."""
        try:
            await self._client.close(**kwargs)
        finally:
            for run in list(self._runs):
                await run.close()

    def end(self) -> None:
        """Let the thread end. Any thread may call this, and more than once."""
        # In a forked process the thread does not exist, and the loop belongs to the parent.
        if self.is_alive():
            # The loop may have been closed meanwhile.
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._ended.set)

    def end_unclosed(self) -> None:
        """Let the thread end, and warn if its client was never closed."""
        try:
            self._client.pool.warn_unclosed()
        finally:
            self.end()

    def _end_at_exit(self) -> None:
        try:
            self.end_unclosed()
        finally:
            self.join(_LONGEST_END)


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks of the loop, as ``asyncio.Runner`` does.

    A caller that waits for one of the tasks receives its ``CancelledError``.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=_LONGEST_END)
        if left:
            logger.warning("cancelled, and not ended with the client: %s", left)
    await loop.shutdown_asyncgens()


async def plain(call: Callable[[], _T]) -> _T:
    """Wrap a plain function as a coroutine, so that it can run on the loop's thread."""
    return call()
