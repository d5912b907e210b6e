"""The states of a pool, from its entry to its end, for local and remote pools alike."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import Any

from .. import tracing
from ..errors import UsageError
from ..transport.unclosed import warn_unless_closed
from .driver import Driver

logger = logging.getLogger("sglrl.driver")
_OPEN: weakref.WeakSet[Lifetime] = weakref.WeakSet()
"""The pools that the interpreter closes when it exits. Some of them may be closed already."""


class Lifetime:
    """The state of one pool, which is entered once and closed once.

    Args:
        name: the name of the pool, for the warning that it was never closed.

    Attributes:
        closing: whether the pool is closing or closed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered = False
        self._unclosed: weakref.finalize[..., Any] | None = None
        self._draining = 0
        """Number of tasks that have called ``_drain`` and were not cancelled in it."""
        self.closing = False

    def enter(self) -> None:
        """Raise ``UsageError`` if the pool has been entered before. Look up the tracer."""
        if self._entered:
            raise UsageError("this has been started before; make another one with launch or spawn")
        tracing.look_up()
        self._entered = True

    def opened(self, pool: object) -> None:
        """Warn from now on if ``pool`` is never closed."""
        self._unclosed = warn_unless_closed(pool, self._name)

    def closes_at_exit(self) -> None:
        """Do not warn if the pool is open when the interpreter exits, because the exit closes it.

        Log a warning if an earlier pool of this name is still open. Probably a notebook's cell ran
        twice, and no variable refers to the earlier pool any more.
        """
        if self._unclosed is not None:
            self._unclosed.atexit = False
        if any(other._name == self._name and not other.closing for other in _OPEN):
            logger.warning(
                "%s was started before and is still open: its workers run until the program "
                "exits, unless you call its close()",
                self._name,
            )
        _OPEN.add(self)

    def warn_unclosed(self) -> None:
        """Warn now, unless the pool is closed."""
        if self._unclosed is not None:
            self._unclosed()

    async def begin_closing(self, driver: Driver | None, *, drain: bool, timeout: float) -> bool:
        """Set ``closing``. With ``drain``, first wait for the pending calls.

        Args:
            driver: the driver of the pool. None: the pool has not started.
            drain: whether to wait for the pending calls. New calls are refused meanwhile.
            timeout: maximum seconds to wait for the pending calls.

        Returns:
            False if the caller must not close the pool: another task closes it, or the pool
            belongs to the process that this process was forked from.

        Raises:
            UsageError: the running event loop is not the loop of the driver.
        """
        if self.closing:
            return False
        if driver is not None:
            if driver.is_copied:
                return False
            driver.check_loop()
            if drain:
                await self._drain(driver, timeout)
                if self.closing:
                    return False
        self.closing = True
        return True

    def closed(self) -> None:
        """Record that the pool is closed, so that no warning follows."""
        if self._unclosed is not None:
            self._unclosed.detach()

    async def _drain(self, driver: Driver, timeout: float) -> None:
        """Refuse new calls and wait until no call is left. A cancellation undoes the refusal."""
        fabric = driver.fabric
        self._draining += 1
        fabric.refusing = True
        try:
            async with asyncio.timeout(timeout):
                while fabric.calls:
                    await driver.idle()
        except TimeoutError:
            pass
        except BaseException:
            self._draining -= 1
            fabric.refusing = self._draining > 0
            raise
