"""The control of a pool in the process that launched it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from ..driver.pool import Pool
from ..weights.local_sender import LocalSender
from .adapters import PoolAdapters
from .operations import Operation
from .pausing import PoolPausing
from .sleeping import PoolSleeping

_P = TypeVar("_P")


class PoolControl:
    """The parts of a pool that operations use, such as its adapters and its pause state.

    Args:
        pool: the pool that is controlled.
        adapters: the folders of the adapters to load at the start, by the adapters' names.
    """

    is_local: Final = True

    def __init__(self, pool: Pool, adapters: Mapping[str, Any] | None = None) -> None:
        self.sender = LocalSender(pool.weights)
        self.adapters = PoolAdapters(pool, adapters)
        self._pausing = PoolPausing(pool)
        self._sleeping = PoolSleeping(pool)
        self._parts: dict[type, Any] = {
            Pool: pool,
            LocalSender: self.sender,
            PoolAdapters: self.adapters,
            PoolPausing: self._pausing,
            PoolSleeping: self._sleeping,
        }

    def part(self, kind: type[_P]) -> _P:
        part: _P = self._parts[kind]
        return part

    async def start(self) -> None:
        self._pausing.start()
        self._sleeping.start()
        await self.adapters.start()

    async def run(
        self, operation: Operation, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return await operation.function(client, *args, **kwargs)
