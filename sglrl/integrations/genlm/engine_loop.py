"""Run work on the client's event loop, for callers on other threads and loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...errors import Closed, DeadlineExceeded, UsageError

_T = TypeVar("_T")

_PATIENCE = 30.0
"""The maximum number of seconds to wait until the loop runs a callback."""


class EngineLoop:
    """The event loop of the client that runs the queries. Any thread may use this object."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    def is_here(self) -> bool:
        """Return whether the caller runs on this loop."""
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def check_not_here(self) -> None:
        """Check that the caller may block while it waits for this loop.

        Raises:
            UsageError: the caller runs on this loop.
        """
        if self.is_here():
            raise UsageError(
                "this would block the event loop that the client needs to answer it; await the "
                "asynchronous form, or give the class a BlockingClient"
            )

    def post(self, work: Callable[..., object], *args: Any) -> None:
        """Schedule ``work`` on this loop.

        Raises:
            Closed: the loop is closed.
        """
        try:
            self.loop.call_soon_threadsafe(work, *args)
        except RuntimeError:
            raise _closed() from None

    def call(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on this loop and return its result.

        Raises:
            UsageError: the caller runs on this loop.
            Closed: the loop is closed.
        """
        self.check_not_here()
        if self.loop.is_closed():
            raise _closed()
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` on this loop and wait until it is done.

        Runs ``work`` directly if the caller is on this loop, or if this loop is not running.

        Raises:
            DeadlineExceeded: the loop did not run ``work`` within 30 s.
        """
        if self.is_here() or not self.loop.is_running():
            work()
            return
        done = threading.Event()

        def there() -> None:
            work()
            done.set()

        self.post(there)
        if not done.wait(_PATIENCE):
            raise DeadlineExceeded(f"the client's event loop was blocked for {_PATIENCE:.0f} s")


def _closed() -> Closed:
    return Closed("the client that this model asks is closed")
