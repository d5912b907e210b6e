"""The driver's end and the workers' ends over each transport, with one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from sglrl.transport.base import DriverKeys, DriverTransport, WorkerTransport
from sglrl.transport.memory import MemoryRouter
from sglrl.transport.zmq import ZmqDealer, ZmqRouter, key_pair

LIMIT = 16 << 20
"""Largest frame in bytes."""


class Link(Protocol):
    router: DriverTransport

    def dealer(self, identity: bytes) -> WorkerTransport:
        """Return a worker's end, and begin to connect it."""
        ...


class MemoryLink:
    def __init__(self) -> None:
        self.router = MemoryRouter()

    def dealer(self, identity: bytes) -> WorkerTransport:
        return self.router.connect(identity)


class ZmqLink:
    def __init__(self, address: str, keys: DriverKeys | None = None) -> None:
        self.router = ZmqRouter(address, max_message_bytes=LIMIT, keys=keys)

    def dealer(self, identity: bytes) -> ZmqDealer:
        router = self.router
        return ZmqDealer(router.address, identity, max_message_bytes=LIMIT, keys=router.worker_keys)


_sockets = count()

LINKS: dict[str, Callable[[Path], Link]] = {
    "memory": lambda folder: MemoryLink(),
    "ipc": lambda folder: ZmqLink(f"ipc://{folder}/{next(_sockets)}"),
    "tcp": lambda folder: ZmqLink("tcp://127.0.0.1:*"),
    "curve": lambda folder: ZmqLink(
        "tcp://127.0.0.1:*", DriverKeys(secret=key_pair()[1], clients=frozenset())
    ),
}


class Inbox:
    """Collects the arguments of a callback. ``reach`` waits for a number of messages."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self._wanted = 0
        self._event = asyncio.Event()

    def __call__(self, *message: Any) -> None:
        self.got.append(message if len(message) > 1 else message[0])
        if len(self.got) >= self._wanted:
            self._event.set()

    async def reach(self, wanted: int) -> list[Any]:
        self._wanted = wanted
        if len(self.got) < wanted:
            self._event.clear()
            await self._event.wait()
        return self.got
