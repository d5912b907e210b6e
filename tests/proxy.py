"""A TCP proxy between the two ends of a connection. It can stop forwarding without closing."""

from __future__ import annotations

import asyncio
from typing import Self


class Proxy:
    """``async with Proxy() as proxy``: listens at ``address`` and forwards to ``target``.

    Both look like "tcp://127.0.0.1:5555". ``target`` may be set after entering, but before the
    first connection.
    """

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.address = ""
        self.count = 0
        """Number of connections so far."""
        self.beginnings: dict[int, bytes] = {}
        """The first bytes that were sent to the target on each connection."""
        self.arrived = asyncio.Event()
        """Set when bytes for the target arrive. A waiter clears it first."""
        self._open: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def silence(self, number: int) -> None:
        """Forward no more data of a connection, in either direction. The first has number 0."""
        self._open[number].clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.removeprefix("tcp://").rpartition(":")
        there = await asyncio.open_connection(host, int(port))
        is_open = self._open[self.count] = asyncio.Event()
        is_open.set()
        number, self.count = self.count, self.count + 1
        self.beginnings[number] = b""
        for source, sink, seen in ((reader, there[1], number), (there[0], writer, None)):
            task = asyncio.create_task(self._forward(source, sink, is_open, seen))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        is_open: asyncio.Event,
        seen: int | None,
    ) -> None:
        """Forward one direction. ``seen``: the number of the connection, for ``beginnings``."""
        try:
            while data := await source.read(1 << 16):
                if seen is not None and len(self.beginnings[seen]) < 1 << 10:
                    self.beginnings[seen] += data
                    self.arrived.set()
                await is_open.wait()
                sink.write(data)
                await sink.drain()
            await is_open.wait()
        except ConnectionError:
            await is_open.wait()
        finally:
            sink.close()
