"""A gateway whose internal state tests can read, and a client that sends raw bytes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import time
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
import psutil
import pytest
from uvicorn.server import ServerState

import sglrl
from sglrl.gateway import process
from sglrl.gateway.process import GatewayProcess
from sglrl.gateway.running_turns import RunningTurns
from sglrl.gateway.serve import Gateway
from sglrl.gateway.settings import Settings

REQUESTS = int(os.environ.get("SGLRL_FUZZ_REQUESTS", "4000"))
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
CONTEXT = 256
MAX_BYTES = 100_000
BODY_SECONDS = 0.5
_POOLS = ("sglrl text", "sglrl trainer")
_SECONDS = 300.0
"""For an answer, and for the gateway to settle."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway's process holds.

    Attributes:
        answered: number of requests so far.
        threads: without those of pools, of which there are a few.
        memory: resident, in bytes.
        errors: what was logged as an error.
    """

    sessions: list[str]
    turns: int
    tasks: int
    files: int
    threads: int
    answered: int
    memory: int
    errors: list[str]

    @property
    def held(self) -> tuple[int, ...]:
        """What must not depend on the number of requests."""
        return len(self.sessions), self.turns, self.tasks, self.files, self.threads


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record)[-3000:])


class WatchedProcess(GatewayProcess):
    async def open(self) -> None:
        self._errors = _Errors()
        logging.getLogger().addHandler(self._errors)
        await super().open()

    @sglrl.endpoint
    async def state(self) -> State:
        # Tasks that wait for each other in a cycle are warned about when they are collected.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        alive = gc.get_objects()
        turns = [one for one in alive if isinstance(one, RunningTurns)]
        servers = [one for one in alive if isinstance(one, ServerState)]
        pooled = [one for one in threading.enumerate() if one.name.startswith(_POOLS)]
        return State(
            sessions=list(self._registry._by_id),
            turns=sum(map(len, turns)),
            tasks=len(asyncio.all_tasks()),
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")) - len(pooled),
            answered=sum(one.total_requests for one in servers),
            memory=psutil.Process().memory_info().rss,
            errors=self._errors.texts,
        )


class Watched:
    """A running gateway.

    Attributes:
        document: its OpenAPI document.
        seen: number of answers by status.
        began, before: when ``begin`` was called, in seconds since 1970, and what the process held.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.url = gateway.url
        self.document: dict[str, Any] = {}
        self.seen: dict[int, int] = {}
        self.began = 0.0
        self.before: State

    async def state(self) -> State:
        return await self._gateway._processes.state()  # type: ignore[no-any-return]

    async def connect(self) -> Connection:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return Connection(*await asyncio.open_connection(host, int(port)))

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        made = await self.connect()
        try:
            yield made
        finally:
            await made.close()

    async def begin(self) -> None:
        """Take what the process holds now as what it must hold at the end."""
        self.seen.clear()
        async with self.connected() as http:
            answer = await http.request("GET", "/openapi.json")
            self.document = json.loads(answer.body)
            for _ in range(40):
                assert (await http.request("POST", "/v1/chat/completions", ASK)).status == 200
        await self.end_sessions()
        self.before = await self.settled()
        self.began = time()

    async def settled(self, at: State | None = None) -> State:
        """Return the state when it is as before, or, without ``at``, when it does not change."""
        before = at
        async with asyncio.timeout(_SECONDS):
            while True:
                now = await self.state()
                if before is not None and _less(now.held, before.held):
                    return now
                before = at or now

    async def end_sessions(self) -> None:
        for session in (await self.state()).sessions:
            # The gateway closes a connection that has been idle for some seconds.
            async with self.connected() as http:
                assert (await http.request("DELETE", f"/sessions/{session}")).status == 200

    async def check(self) -> State:
        """Check that nothing is left of the requests, and that others are answered."""
        await self.end_sessions()
        async with self.connected() as http:
            assert (await http.request("POST", "/v1/chat/completions", ASK)).status == 200
            made = json.loads((await http.request("POST", "/sessions")).body)
            at = f"/sessions/{made['id']}"
            answer = await http.request("POST", f"{at}/v1/chat/completions", ASK)
            assert answer.status == 200
            answer = await http.request("DELETE", at)
            assert len(json.loads(answer.body)["trajectories"]) == 1
        try:
            state = await self.settled(self.before)
        except TimeoutError:
            raise AssertionError(f"{await self.state()}\nwas\n{self.before}") from None
        assert not state.errors, state.errors[0]
        return state

    def check_answer(self, path: str, answer: Answer) -> None:
        """Check that the status is below 500, and that an error has the form of its API.

        Operations on the pool have a time limit of the request, which may pass (504).

        Args:
            path: of the request. "": it is unknown, and an error may have the form of any API.
        """
        self.seen[answer.status] = self.seen.get(answer.status, 0) + 1
        late = "/pool/" in path and answer.status == 504
        assert answer.status < 500 or late, (path, answer)
        if answer.headers.get("content-type") == "text/event-stream":
            assert answer.body.count(b"\n\n"), answer
            # An error after the begin of a stream.
            assert b'"server_error"' not in answer.body, answer
        elif answer.status >= 400:
            error = json.loads(answer.body)
            assert any(_fits(form, error) for form in self._forms(path)), (path, answer)

    def _forms(self, path: str) -> list[Any]:
        """Return the schemas of the errors of an endpoint, or of all."""
        plain = unquote(path.partition("?")[0])
        found = {
            pattern: operation["responses"]["4XX"]["content"]["application/json"]["schema"]
            for pattern, item in self.document["paths"].items()
            for method, operation in item.items()
            if method != "parameters"
        }
        fitting = [
            form
            for pattern, form in found.items()
            if not path or re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), plain)
        ]
        return fitting or [found["/v1/chat/completions"]]


def _less(now: tuple[int, ...], before: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(now, before, strict=True))


def _fits(schema: Any, value: Any) -> bool:
    kinds = {"object": dict, "string": str, "integer": int, "boolean": bool}
    return isinstance(value, kinds.get(schema.get("type"), object)) and all(
        name in value and _fits(schema["properties"][name], value[name])
        for name in schema.get("required", ())
    )


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError:
            # The gateway has closed the connection. There may be an answer nevertheless.
            return

    async def request(
        self, method: str, path: str, body: Any = b"", headers: bytes = b""
    ) -> Answer:
        """Send a request.

        Args:
            body: bytes, or an object for JSON.
        """
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nContent-Length: {len(content)}\r\n".encode()
        host = b"" if b"Host:" in headers else b"Host: x\r\n"
        await self.send(head + headers + host + b"\r\n" + content)
        answer = await self.answer(method)
        assert answer is not None, (method, path, content)
        return answer

    async def answer(self, method: str = "POST", what: bytes = b"") -> Answer | None:
        """Return the next answer. None: the connection was closed.

        Args:
            what: was sent, for errors.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                return await self._answer(method)
        except TimeoutError:
            raise AssertionError(
                f"neither an answer nor the end of the connection: {what[-1000:]!r}"
            ) from None

    async def _answer(self, method: str) -> Answer | None:
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").strip().split("\r\n")
            status = int(first.split()[1])
            pairs = (line.partition(": ")[::2] for line in lines)
            headers = {name.lower(): value for name, value in pairs}
            if method == "HEAD":
                return Answer(status, headers, b"")
            if headers.get("transfer-encoding") == "chunked":
                return Answer(status, headers, b"".join([part async for part in self._parts()]))
            size = int(headers.get("content-length", "0"))
            return Answer(status, headers, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _parts(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline() or b"0", 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readline()

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


@asynccontextmanager
async def watched_gateway(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(process, "GatewayProcess", WatchedProcess)
    settings = Settings(names=("tiny",), max_body_bytes=MAX_BYTES, body_seconds=BODY_SECONDS)
    async with (
        sglrl.launch("tiny", engine="fake", context_length=CONTEXT) as client,
        Gateway(client, settings, 1) as gateway,
    ):
        yield Watched(gateway)
