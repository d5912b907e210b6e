"""The interface of a pool for its client. Local and remote pools implement it."""

from __future__ import annotations

from typing import Protocol

from ..weights.port import WeightsPort
from ..wire.calls import Load
from ..wire.engine import EngineInfo
from .driver import Driver
from .worker_info import QueueInfo, WorkerInfo


class PoolPort(Protocol):
    """The pool of a ``Client``.

    ``driver.pool.Pool`` implements it with worker processes. ``remote.pool.RemotePool`` implements
    it with the pool of another process.
    """

    @property
    def driver(self) -> Driver:
        """The driver that calls are submitted to. Raises ``Closed`` before ``enter``."""
        ...

    @property
    def weights(self) -> WeightsPort: ...

    @property
    def engine(self) -> EngineInfo | None:
        """The properties of the workers' engines, or None if the workers have no engine."""
        ...

    @property
    def workers(self) -> list[WorkerInfo]: ...

    @property
    def queue(self) -> QueueInfo: ...

    def loads(self) -> tuple[list[Load], int]:
        """Return the load that each ready engine reports, and the number of waiting calls."""
        ...

    async def enter(self) -> None:
        """Start the pool, or connect to the remote pool. A pool can be entered once."""
        ...

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None: ...

    def closes_at_exit(self) -> None:
        """Do not warn if the pool is open at interpreter exit, because the exit closes it."""
        ...

    def warn_unclosed(self) -> None:
        """Warn unless the pool is closed."""
        ...
