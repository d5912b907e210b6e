"""The state of a whole pool at one moment, for everything that shows a pool."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec

from ..core.rollout_metrics import RolloutMetrics
from ..driver.worker_info import HostInfo, QueueInfo, WorkerHistory, WorkerInfo
from ..weights.update_report import UpdateReport
from ..wire.engine import EngineStats
from .latest import Latest

_ENDED: Final = 1024
"""The number of ended samples that are kept while somebody watches."""


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a pool.

    Attributes:
        info: the state of the worker, as in ``Client.workers``.
        history: its age, and what has happened to it.
        engine: the statistics of its engine. None if the worker does not serve, or has not answered
            within 2 s.
    """

    info: WorkerInfo
    history: WorkerHistory
    engine: EngineStats | None


class RolloutSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of the program that launched the pool.

    Attributes:
        metrics: the progress of the rollout.
        staleness: how many groups were delivered, by their staleness in policy versions.
        items: the number of items in the data set, if it is known.
        group_size: the number of samples of each item.
        batch_size, max_staleness: the arguments of ``sglrl.rollout``.
        errors: the most frequent errors of agents with their counts, at most 3.
    """

    metrics: RolloutMetrics
    staleness: dict[int, int]
    items: int | None
    group_size: int
    batch_size: int | None
    max_staleness: int | None
    errors: list[str]


class SessionSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One open session of a gateway.

    Attributes:
        id: the id of the session, which is part of its URL.
        running: the number of its requests that are running.
        turns: the number of its finished turns.
        idle: seconds since its last request.
    """

    id: str
    running: int
    turns: int
    idle: float


class GatewaySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway in the program that launched the pool.

    Attributes:
        url: the URL of the gateway.
        running: the number of requests that are being sampled, with and without a session.
        sessions: the open sessions.
    """

    url: str
    running: int
    sessions: list[SessionSnapshot]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a pool at one moment.

    Attributes:
        time: when it was made, in seconds as ``time.time`` returns them.
        host, pid: where the program runs that launched the pool.
        model: the model's folder or name.
        seconds: time since the pool has started.
        weight_version: the policy version of the pool.
        held: why no calls are sent to the workers, for example because the pool is paused. Else "".
        queue: the calls that wait because no worker has room.
        workers: the workers, in the order of their ids.
        updates: the reports of the latest 64 weight updates, oldest first.
        adapters: the version of each LoRA adapter, by name.
        rollouts: the rollouts that run now in the program that launched the pool.
        gateways: the gateways of that program.
        hosts: the other machines on which workers may run.
    """

    time: float
    host: str
    pid: int
    model: str
    seconds: float
    weight_version: int
    held: str
    queue: QueueInfo
    workers: list[WorkerSnapshot]
    updates: list[UpdateReport]
    adapters: dict[str, int]
    rollouts: list[RolloutSnapshot]
    gateways: list[GatewaySnapshot]
    hosts: list[HostInfo]


class LiveSource(Protocol):
    """The sessions of other processes, for programs that watch them.

    ``sessions/live.py`` defines the values, which are in a higher folder.
    """

    async def live_samples(self) -> list[Any]:
        """Return the open sessions."""

    async def live_state(self, id_: str, turns: int, tokens: int, seconds: float) -> Any:
        """Return one open session, or None if this source has none with this id."""


class Observed:
    """What uses a client: rollouts and gateways. Each registers itself while it runs.

    Attributes:
        begun: when the client was made, on the monotonic clock.
        rollouts, gateways: functions that return the present snapshot of each. Those of gateways
            ask other processes.
        live: the sessions of other processes.
        ended: the samples of rollouts that have ended, while somebody watches.
    """

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.rollouts: list[Callable[[], RolloutSnapshot]] = []
        self.gateways: list[Callable[[], Awaitable[GatewaySnapshot]]] = []
        self.live: list[LiveSource] = []
        self.ended: Latest[Any] = Latest(_ENDED)
