"""A process of a gateway, which runs an HTTP server and is a client of the pool."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import msgspec

from ..actors.actor import Actor, endpoint
from ..control.snapshot import GatewaySnapshot
from ..errors import UsageError
from ..remote.client import client_of
from ..remote.pool import RemotePool
from ..sessions.record import Record
from ..sessions.trajectory import record_of
from ..wire.processes import PoolEntry
from .local import LocalGateway
from .registry import Registry
from .settings import ProcessPlace, Settings


class Opened(msgspec.Struct, frozen=True):
    """The id and the key of a session that was opened."""

    id: str
    key: str


class GatewayProcess(Actor):
    """The actor in each process of a gateway. ``serve`` spawns it."""

    def __init__(
        self,
        settings: Settings,
        entry: PoolEntry,
        model: str,
        timeout: float | None,
        place: ProcessPlace,
    ) -> None:
        self._settings = settings
        self._place = place
        self._client = client_of(RemotePool(entry), model=model, timeout=timeout)
        self._stack = AsyncExitStack()
        self._registry: Registry
        self._gateway: LocalGateway

    async def open(self) -> None:
        client = await self._stack.enter_async_context(self._client)
        self._gateway = LocalGateway(client, self._settings, self._place)
        self._registry = (await self._stack.enter_async_context(self._gateway)).registry

    async def close(self) -> None:
        await self._stack.aclose()

    @endpoint(idempotent=True)
    async def snapshot(self) -> GatewaySnapshot:
        return await self._gateway.snapshot()

    @endpoint
    async def open_session(
        self, metadata: dict[str, Any], reward_weights: dict[str, float] | None
    ) -> Opened:
        session = self._registry.open(metadata, reward_weights)
        return Opened(session.id, session.key)

    @endpoint
    async def reward(
        self,
        session: str,
        value: float | bool | dict[str, float | bool],
        name: str,
        call: str | None,
    ) -> None:
        opened = self._registry.by_id(session)
        if opened is None:
            raise UsageError("the session has ended")
        opened.conversations.reward(value, name, call)

    @endpoint
    async def end_session(self, session: str) -> Record | None:
        """End a session. Return its trajectory, or None if no turn was sampled."""
        opened = self._registry.by_id(session)
        if opened is None:
            raise UsageError("the session has ended")
        await self._registry.end(opened)
        trajectory = opened.conversations.trajectory()
        return None if trajectory is None else record_of(trajectory)
