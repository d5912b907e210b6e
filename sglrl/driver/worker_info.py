"""The report of a pool about its workers and its queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one worker of a pool.

    Attributes:
        id: index of the worker in the pool.
        pid: process id of the worker's rank 0.
        state: "starting"; "syncing" (runs and receives the current weights); "stale" (waits for the
            next update, because no worker could send the current weights); "ready"; "away" (its
            connection is broken, and it may return); "draining" (accepts no new calls); "lost" (a
            replacement follows); "retired" (no replacement follows).
        weight_version: policy version of the worker's weights. -1 if it is not known, because the
            worker was away during an update.
        device: the device of the worker, such as "cpu" or "cuda:0".
        host: name of the worker's host. Empty for the machine of the pool.
        load: number of calls that the worker holds.
        window: number of calls that the worker may hold.
        kept_bytes: bytes of host memory in which the worker keeps a copy of its weights. With
            ``launch(keep_weights="host")``, one worker on each host keeps a copy.
    """

    id: int
    pid: int
    state: str
    weight_version: int
    device: str
    load: int
    window: int
    host: str = ""
    kept_bytes: int = 0


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that wait in the driver because no worker has room.

    Attributes:
        calls: number of waiting calls of all clients.
        bytes: bytes of the waiting calls; ``max_queue_bytes`` limits them.
        clients: number of clients that have waiting calls.
    """

    calls: int
    bytes: int
    clients: int


def describe(workers: Iterable[WorkerInfo]) -> str:
    """Return the number of workers in each state except "retired", such as "2 ready, 1 lost"."""
    states = Counter(worker.state for worker in workers if worker.state != "retired")
    return ", ".join(f"{n} {state}" for state, n in states.items()) or "no workers"
