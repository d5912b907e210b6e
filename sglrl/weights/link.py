"""One process's part in one group: the communicator, its neighbour on the same GPU, and a thread.

What waits for other processes waits on that thread. When the group is given up the whole link is
abandoned: whatever the thread waits in ends by itself (NCCL's at once, gloo's when the peers hang
up or its time-out passes), sees that it was abandoned, and the thread ends.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import WeightUpdateError
from .cuda_ipc import SharedReader, SharedSender
from .group import Group, Store

END_SECONDS = 2.0
_live: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """Jobs run in order, one at a time. ``group``, ``sender``, ``reader`` and ``store`` are set by
    jobs.

    ``store``: of this link alone, and referenced only from here. Dropping it closes it, which ends
    every wait for a key of it, also in the middle of forming a group.

    ``packing``: the sender's buckets. A job that was abandoned may still write to them, so another
    link has its own.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self.sender: SharedSender | None = None
        self.reader: SharedReader | None = None
        self.store: Store | None = None
        self.packing: Any = None
        self.abandoned = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Daemons: a program that ends does not wait for a peer that hangs, or not long (``_end``).
        self._threads = [threading.Thread(target=self._run, name="sglrl-weights", daemon=True)]
        _live.add(self)
        self._threads[0].start()

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
        aborting = threading.Thread(target=self._abort, name="sglrl-weights-abort", daemon=True)
        self._threads.append(aborting)
        aborting.start()

    def _abort(self) -> None:
        self.store = None
        for part in (self.group, self.sender, self.reader):
            if part is not None:
                part.abort()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self.abandoned:
                job()
            # While the thread waits, this frame must not keep alive what the job refers to.
            del job
        if self.group is not None:
            self.group.close()

    def join(self, seconds: float) -> None:
        """Wait for the end of an abandoned link's threads, but no longer than that."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


@atexit.register
def _end() -> None:
    """A thread that comes back from gloo or NCCL while the interpreter ends would take the process
    down with SIGABRT."""
    links = list(_live)
    for link in links:
        link.abandon()
    end = time.monotonic() + END_SECONDS
    for link in links:
        link.join(max(0.0, end - time.monotonic()))
