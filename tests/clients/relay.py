"""A relay before the gateway that records every HTTP call, whatever library makes it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httptools


class Call(NamedTuple):
    """A request with JSON.

    Attributes:
        path: without the prefix of a session.
    """

    path: str
    body: dict[str, Any]


class Relay:
    """``async with Relay(url) as relay``: listens at ``relay.url`` and forwards to ``url``.

    Attributes:
        calls: all requests with a body, in the order of their ends.
        statuses: of all answers.
    """

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.calls: list[Call] = []
        self.statuses: list[int] = []
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ways: list[asyncio.Future[None]] = []
        ends = [writer]
        try:
            target = self._target
            back, there = await asyncio.open_connection(target.hostname, target.port)
            ends.append(there)
            requests = httptools.HttpRequestParser(_Request(self.calls))
            answer = _Answer(self.statuses)
            answer.parser = httptools.HttpResponseParser(answer)
            ways.append(asyncio.ensure_future(_forward(reader, there, requests)))
            ways.append(asyncio.ensure_future(_forward(back, writer, answer.parser)))
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.close()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parser: Any) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            parser.feed_data(data)
            writer.write(data)
            await writer.drain()


class _Request:
    """Receives what ``httptools`` finds in the requests of a connection."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._body:
            # Anthropic's client appends a second /v1.
            _, slash, path = self._url.decode().rpartition("/v1/")
            self._calls.append(Call(slash + path, json.loads(self._body)))


class _Answer:
    """Receives what ``httptools`` finds in the answers of a connection."""

    parser: Any

    def __init__(self, statuses: list[int]) -> None:
        self._statuses = statuses

    def on_headers_complete(self) -> None:
        self._statuses.append(self.parser.get_status_code())
