"""The report of a pool about its workers, its queue and its hosts."""

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


class WorkerHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened to one worker since its pool started.

    Attributes:
        seconds: time since the start of the worker's present process.
        restarts: number of times that the worker was replaced.
        silence: seconds since the worker's process gave a sign of life. None with
            ``launch(hang_timeout=None)``, because it then sends no heartbeats.
        moved_calls: number of calls that other workers continued because this worker was lost.
        preempted: number of requests that the engine removed from a full KV cache, since its start.
    """

    seconds: float
    restarts: int
    silence: float | None
    moved_calls: int
    preempted: int


class HostInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of one host.

    Attributes:
        name: the name of the host, which is unique in the program.
        state: "connected", or "away" if the connection is broken and the host may return.
        gpus: the GPUs of the host, as entries for ``CUDA_VISIBLE_DEVICES``.
        cores: number of CPU cores.
        python: the version of Python on the host, such as "3.12".
        limits: the versions that differ from this program's, each with what does not work.
    """

    name: str
    state: str
    gpus: tuple[str, ...]
    cores: int
    python: str
    limits: list[str]


def describe(workers: Iterable[WorkerInfo]) -> str:
    """Return the number of workers in each state except "retired", such as "2 ready, 1 lost"."""
    states = Counter(worker.state for worker in workers if worker.state != "retired")
    return ", ".join(f"{n} {state}" for state, n in states.items()) or "no workers"
