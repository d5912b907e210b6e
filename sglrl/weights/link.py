"""The part of one process in one group: the communicator, the CUDA IPC peer, and a thread.

Every wait for another process runs on that thread. A process that gives up the group abandons the
whole link. The thread's current wait then ends: an NCCL wait ends at once, and a gloo wait ends
when the peers disconnect or its time limit passes. After that the thread exits, because the link is
abandoned.
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
    """Runs jobs on its thread, in order and one at a time.

    Jobs set ``group``, ``sender``, ``reader`` and ``store``.

    Attributes:
        group: the communicator.
        sender: the sender's end of CUDA IPC, in the sending process.
        reader: the worker's end of CUDA IPC, if the worker is on the sender's GPU.
        store: a store that only this link uses and references. Dropping the reference closes the
            store. That ends every wait for one of its keys, even while a group is being formed.
        packing: the sender's buckets. An abandoned job may still write to them, so they belong to
            one link only.
        abandoned: whether the link is abandoned.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        self.sender: SharedSender | None = None
        self.reader: SharedReader | None = None
        self.store: Store | None = None
        self.packing: Any = None
        self.abandoned = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Use daemon threads, because an exiting program must not wait for a peer that hangs.
        # ``_end`` limits the wait to ``END_SECONDS``.
        self._threads = [threading.Thread(target=self._run, name="sglrl-weights", daemon=True)]
        _live.add(self)
        self._threads[0].start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job for the link's thread. ``job`` must not raise."""
        self._jobs.put(job)

    def check(self) -> None:
        """Raise ``WeightUpdateError`` if the link is abandoned."""
        if self.abandoned:
            raise WeightUpdateError("the update was given up")

    def abandon(self) -> None:
        """Stop the link's work as far as possible, then its thread.

        Any thread may call this. It returns at once.
        """
        if self.abandoned:
            return
        self.abandoned = True
        self._jobs.put(None)
        # Abort on another thread, because aborting a communicator may take long.
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
            # Delete the job, so that this frame does not keep its objects alive during a wait.
            del job
        if self.group is not None:
            self.group.close()

    def join(self, seconds: float) -> None:
        """Wait until the threads of an abandoned link exit, for at most ``seconds``."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))


@atexit.register
def _end() -> None:
    """Abandon all links and wait for their threads, for at most ``END_SECONDS``.

    A thread that returns from gloo or NCCL during interpreter shutdown would abort the process with
    SIGABRT.
    """
    links = list(_live)
    for link in links:
        link.abandon()
    end = time.monotonic() + END_SECONDS
    for link in links:
        link.join(max(0.0, end - time.monotonic()))
