"""Agents whose connections to the gateway break. They retry as OpenAI's client does."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import struct
from collections import Counter
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from .storm_dialects import DIALECTS, Answer, Ask, Dialect, Reading, whole_answer

FAULTS = {
    "none": 12,
    "gives up": 4,
    "leaves a stream": 4,
    "sends half": 1,
    "sends all and leaves": 2,
    "resets the connection": 1,
}
"""What happens to a request, and how often."""
MAX_FAULTS = 3
"""Of one request. Then it is sent without a fault."""
MEAN_PATIENCE = 0.2
"""Seconds after which a client gives up, on average."""
MAX_LINES = 40
"""Of a stream that a client leaves."""
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For all clients. It is not used, but making one for each client takes long."""


class Left(Exception):
    """The client has disconnected before the end of the answer."""


def http_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=None, verify=_TLS, trust_env=False)


class Agent:
    """One agent: an async context manager.

    Args:
        base_url: of the session, or of the gateway.
        key: "": requests have no key.
        chance: decides what happens to each request.
        fields: of each request.
        counts: gets the number of faults and of requests by dialect.
    """

    def __init__(
        self,
        base_url: str,
        key: str,
        chance: random.Random,
        fields: dict[str, Any],
        counts: Counter[str],
    ) -> None:
        self._base_url = base_url
        self._headers = {"content-type": "application/json"}
        if key:
            name, prefix = chance.choice([("authorization", "Bearer "), ("x-api-key", "")])
            self._headers[name] = prefix + key
        self._chance = chance
        self._fields = fields
        self._counts = counts
        self._http = http_client()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def drop_connections(self) -> None:
        """Close all connections. The next request opens another one."""
        await self._http.aclose()
        self._http = http_client()

    async def send(self, name: str, ask: Ask) -> Answer:
        """Send a request until its answer arrives. Any status but 200 is an error.

        Args:
            name: of the dialect.
        """
        dialect = DIALECTS[name]
        content = {"model": "any", "stream": ask.stream, **dialect.body(ask), **self._fields}
        body = json.dumps(content).encode()
        self._counts[name] += 1
        seen, faults = "", []
        for attempt in range(MAX_FAULTS + 1):
            (fault,) = self._chance.choices(list(FAULTS), list(FAULTS.values()))
            if attempt == MAX_FAULTS or (fault == "leaves a stream" and not ask.stream):
                fault = "none"
            self._headers["x-stainless-retry-count"] = str(attempt)
            reading = Reading(dialect) if ask.stream else None
            try:
                answer = await self._try(dialect, body, fault, reading)
            except (Left, TimeoutError):
                self._counts[fault] += 1
                faults.append(fault)
                if reading is not None:
                    seen = max(seen, reading.text, key=len)
                continue
            # Every attempt is the same turn.
            assert answer.text.startswith(seen), (faults, seen, answer)
            return answer
        raise AssertionError("the last attempt has no fault")

    async def _try(
        self, dialect: Dialect, body: bytes, fault: str, reading: Reading | None
    ) -> Answer:
        if fault.startswith(("sends", "resets")):
            await self._leave_raw(dialect, body, fault)
            raise Left
        patience = self._chance.expovariate(1 / MEAN_PATIENCE) if fault == "gives up" else None
        async with asyncio.timeout(patience):
            if reading is None:
                return await self._whole(dialect, body)
            most = self._chance.randrange(MAX_LINES) if fault == "leaves a stream" else None
            return await self._stream(dialect, body, reading, most)

    async def _whole(self, dialect: Dialect, body: bytes) -> Answer:
        url = self._base_url + dialect.path
        answer = await self._http.post(url, content=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        return whole_answer(dialect, answer.json())

    async def _stream(
        self, dialect: Dialect, body: bytes, reading: Reading, most: int | None
    ) -> Answer:
        """Read a stream.

        Args:
            most: number of lines after which the client disconnects. None: it does not.
        """
        url = self._base_url + dialect.path
        lines = 0
        async with self._http.stream("POST", url, content=body, headers=self._headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            # httpx also splits lines at other characters, which JSON may contain.
            rest = b""
            async for part in answer.aiter_bytes():
                *whole, rest = (rest + part).split(b"\n")
                for line in whole:
                    if lines == most:
                        raise Left
                    reading.add(line.decode())
                    lines += 1
        return reading.answer()

    async def _leave_raw(self, dialect: Dialect, body: bytes, fault: str) -> None:
        """Send a request, or a part of it, and close the connection."""
        url = urlsplit(self._base_url + dialect.path)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        head = [f"POST {url.path} HTTP/1.1", f"host: {url.netloc}", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in self._headers.items()]
        whole = "\r\n".join([*head, "", ""]).encode() + body
        sent = self._chance.randrange(len(whole)) if fault == "sends half" else len(whole)
        writer.write(whole[:sent])
        await writer.drain()
        if fault == "resets the connection":
            # Without lingering, closing sends RST.
            linger = struct.pack("ii", 1, 0)
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await writer.wait_closed()
