"""``Client.snapshot``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable
from typing import Final

from ..actors.actor import endpoints_of
from ..driver.pool import Pool
from ..errors import SglrlError
from ..wire.engine import EngineStats
from .client_base import ClientBase
from .engine_calls import ask_all
from .engines import EngineEndpoints
from .operations import operation
from .snapshot import GatewaySnapshot, Snapshot, WorkerSnapshot

_STATS: Final = endpoints_of(EngineEndpoints)["stats"]
_SECONDS: Final = 2.0
"""Seconds that an engine or a gateway may take to answer."""


class SnapshotMethods(ClientBase):
    """The method of ``Client`` that describes its whole pool."""

    @operation(urgent=True)
    async def snapshot(self) -> Snapshot:
        """Return the state of the workers, weights, rollouts, gateways and hosts of the pool.

        Nothing is collected before this is called. An engine or a gateway that does not answer
        delays the snapshot by at most 2 s.
        """
        pool = self._control.part(Pool)
        driver = self._running(urgent=True)
        serving = list(driver.ready)
        answers, gateways = await asyncio.gather(
            asyncio.gather(*[self._stats_of(index) for index in serving]),
            asyncio.gather(*[_limited(make()) for make in self.observed.gateways]),
        )
        stats = dict(zip(serving, answers, strict=True))
        return Snapshot(
            time=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            model=pool.engine.model if pool.engine else "",
            seconds=time.monotonic() - self.observed.begun,
            weight_version=pool.weights.version,
            held=str(driver.fabric.holds),
            queue=pool.queue,
            workers=[
                WorkerSnapshot(info=info, history=history, engine=stats.get(info.id))
                for info, history in zip(pool.workers, pool.histories, strict=True)
            ],
            updates=list(pool.weights.versions.reports),
            adapters=dict(self._control.adapters.versions),
            rollouts=[make() for make in self.observed.rollouts],
            gateways=[one for one in gateways if one is not None],
            hosts=pool.hosts,
        )

    async def _stats_of(self, worker: int) -> EngineStats | None:
        with contextlib.suppress(SglrlError):
            driver = self._running(urgent=True)
            answers = await ask_all(driver, _STATS, timeout=_SECONDS, worker=worker)
            stats: EngineStats = answers[worker]
            return stats
        return None


async def _limited(made: Awaitable[GatewaySnapshot]) -> GatewaySnapshot | None:
    """Return the snapshot of a gateway, or None if it does not answer."""
    with contextlib.suppress(SglrlError, TimeoutError):
        async with asyncio.timeout(_SECONDS):
            return await made
    return None
