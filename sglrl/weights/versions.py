"""The version of each worker's weights, and the lock under which weights change."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from ..errors import UsageError
from .ranks import Rank, Ranks
from .update_report import UpdateReport

_KEPT_REPORTS: Final = 64
UNKNOWN: Final = -1
"""The version of a worker that was away during an update, that lacks a part of its version, or that
has freed its weights."""


class Versions:
    """The version of the weights of each worker.

    Attributes:
        current: the version of the last update, or 0 before the first update.
        of: the version of every worker, by index.
        asleep: whether the memory of the weights is freed or saved elsewhere.
        forgotten: whether the engines have dropped their weights, and no update has followed.
        reports: the reports of the latest updates, also of adapters, oldest first.
        lock: held by each update, copy and request for checksums.
        on_version: functions to call after a change of the version.
        on_updated: called after every update, and after sleeping weights are restored. All workers
            with the current weights may then serve.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.current = 0
        self.of: dict[int, int] = {}
        self.asleep = self.forgotten = False
        self.reports: deque[UpdateReport] = deque(maxlen=_KEPT_REPORTS)
        self.lock = asyncio.Lock()
        self.on_version: set[Callable[[], None]] = set()
        self.on_updated: Callable[[], None] = lambda: None

    def is_current(self, worker: int) -> bool:
        """Return whether a worker has the weights of the last update."""
        return self.of.get(worker) == self.current

    def holders(self) -> list[Rank]:
        """Return the ranks of the workers that are up and have the current weights."""
        return [rank for rank in self._ranks.up if self.is_current(rank.worker)]

    def updated(self) -> None:
        """Notify the listeners of an update that has ended. The caller holds the lock."""
        for listener in self.on_version:
            listener()
        self.on_updated()

    def forget(self) -> None:
        """Record that no worker has all weights of the current version."""
        self.of = dict.fromkeys(self.of, UNKNOWN)

    # --- sleep ------------------------------------------------------------------------------------

    def sleep(self, *, kept: bool) -> None:
        """Record that the engines free the memory of their weights. The caller holds the lock.

        Args:
            kept: whether ``wake`` restores the weights. If False, the next update must be complete.
        """
        self.asleep = True
        if not kept:
            self.forgotten = True
            self.forget()

    def wake(self) -> None:
        """Record that the engines have allocated the memory of their weights again."""
        if self.asleep:
            self.asleep = False
            self.on_updated()

    def check_awake(self) -> None:
        """Raise ``UsageError`` while the weights are asleep."""
        if self.asleep:
            raise UsageError('the weights are asleep: await client.wake(["weights"]) first')
