"""The HTTP peer of ``bench.fabric`` and ``bench.rollout``: an aiohttp client, an echo server."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
import msgspec

from .http_echo import Answer, Request
from .parts import ROOT
from .payload import TOKENS

Ask = Callable[[list[int]], Awaitable[Answer]]
"""Send a prompt to the server and return its answer."""

PARSER = "httptools" if importlib.util.find_spec("httptools") else "h11"
"""The HTTP parser that uvicorn uses."""


@contextmanager
def echo_server() -> Iterator[str]:
    """Run ``bench.http_echo`` in its own process. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=8192) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.http_echo", str(listening.fileno())],
            cwd=ROOT,
            pass_fds=(listening.fileno(),),
        )
    try:
        yield url
    finally:
        server.terminate()
        server.wait()


@asynccontextmanager
async def http_client(url: str) -> AsyncIterator[Ask]:
    """Open a client without limits on connections and time."""
    # This JSON codec costs the peer least.
    encode = msgspec.json.Encoder().encode
    decode = msgspec.json.Decoder(Answer).decode
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def ask(ids: list[int]) -> Answer:
            body = encode(Request(ids, TOKENS, True))
            async with session.post(url, data=body, headers=headers) as response:
                return decode(await response.read())

        yield ask
