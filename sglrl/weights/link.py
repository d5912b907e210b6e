"""One process's part in one group: the communicator, its neighbour on the same GPU, and a thread.

What waits for other processes waits on that thread. When the group is given up the whole link is
abandoned: whatever the thread waits in ends by itself (NCCL's at once, gloo's when the peers hang
up or its time-out passes), sees that it was abandoned, and the thread ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ..errors import WeightUpdateError
from .group import Group
from .shared import SharedReader, SharedSender


class Link:
    """Jobs run in order, one at a time. ``group``, ``sender`` and ``reader`` are set by jobs.

    ``ring``: the sender's buckets. A job that was abandoned may still write to them, so another
    link has its own.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self.sender: SharedSender | None = None
        self.reader: SharedReader | None = None
        self.ring: dict[int, Any] = {}
        self.abandoned = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a program that ends does not wait for a peer that hangs.
        self._thread = threading.Thread(target=self._run, name="sglrl-weights", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """``job`` must not raise."""
        self._jobs.put(job)

    def check(self) -> None:
        """Raise ``WeightUpdateError`` once the link was abandoned."""
        if self.abandoned:
            raise WeightUpdateError("the update was given up")

    def abandon(self) -> None:
        """End what can be ended. From any thread; returns at once."""
        if self.abandoned:
            return
        self.abandoned = True
        self._jobs.put(None)
        # Taking a communicator down may take its time.
        threading.Thread(target=self._abort, name="sglrl-weights-abort", daemon=True).start()

    def _abort(self) -> None:
        for part in (self.group, self.sender, self.reader):
            if part is not None:
                part.abort()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self.abandoned:
                job()
        if self.group is not None:
            self.group.close()
