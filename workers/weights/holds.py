"""Hold an engine during a weight update: its scheduler waits and makes no steps."""

from __future__ import annotations

import logging
import threading
import time

from ..engine.loop import IDLE_WAIT

logger = logging.getLogger("sglrl.worker")


class Hold:
    """The hold of an engine for one update. A held engine makes no steps.

    Attributes:
        version: the version of the weights after the hold. None if the version does not change.
        staged: the update whose staged weights become live when the hold ends.
    """

    def __init__(self, update: int) -> None:
        self.update = update
        self.version: int | None = None
        self.staged: int | None = None
        self.begun = 0.0
        self.held = threading.Event()
        self.released = threading.Event()

    def wait(self) -> None:
        """Block the scheduler's thread until ``Holds.release``."""
        self.begun = time.perf_counter()
        self.held.set()
        while not self.released.wait(IDLE_WAIT):
            logger.warning(
                "held for a weight update since %.0f s", time.perf_counter() - self.begun
            )


class Holds:
    """The holds of one rank's engine, at most one at a time. Any thread may call the methods.

    ``held`` and ``release`` implement the methods of ``WeightEngine``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = Hold(-1)
        self._over = -1
        """The id of the last update whose hold was released."""

    def of(self, update: int) -> Hold | None:
        """Return the hold of an update, or None if the hold was already released.

        Create the hold if necessary: if another rank of the replica is ahead, the scheduler's
        thread receives the command to hold before the channel of this rank does.
        """
        with self._lock:
            if update <= self._over:
                return None
            if self._current.update < update:
                self._current = Hold(update)
            return self._current

    def is_over(self, update: int) -> bool:
        """Return whether the hold of this update was released."""
        return update <= self._over

    def held(self, update: int, timeout: float) -> bool:
        with self._lock:
            hold = self._current
            if hold.update != update or update <= self._over:
                return False
        return hold.held.wait(timeout) and not hold.released.is_set()

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        with self._lock:
            self._over = max(self._over, update)
            hold = self._current
            if hold.update > update or hold.released.is_set():
                # The current hold belongs to a later update, or is already released.
                return 0.0
            hold.version = version
            hold.staged = update if staged else None
            hold.released.set()
            # End the wait of ``held``, because the engine will not be held any more.
            hold.held.set()
        return (time.perf_counter() - hold.begun) * 1e3 if hold.begun else 0.0
