"""The HTTP peer of ``bench.fabric`` and ``bench.rollout``: an aiohttp client and an echo server.

The server is a bare ASGI application on uvicorn, in its own process: ``python -m bench.http_peer
FILE``. FILE is the descriptor of an inherited socket that already listens, so the client can
connect at once.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec

from .payload import LOGPROBS, TOKENS

PARSER = "httptools" if importlib.util.find_spec("httptools") else "h11"
"""The HTTP parser that uvicorn uses."""
_HEADERS = [(b"content-type", b"application/json")]


class Request(msgspec.Struct):
    input_ids: list[int]
    max_new_tokens: int
    logprobs: bool


class Answer(msgspec.Struct):
    output_ids: list[int]
    logprobs: list[float]


Ask = Callable[[list[int]], Awaitable[Answer]]
"""Sends a prompt to the server and returns its answer."""
# The peer spends less time with this JSON codec than with any other.
_encode = msgspec.json.Encoder().encode
_decode_request = msgspec.json.Decoder(Request).decode
_decode_answer = msgspec.json.Decoder(Answer).decode


@contextmanager
def echo_server() -> Iterator[str]:
    """Run the server in its own process, and yield its URL."""
    from .parts import ROOT

    with socket.create_server(("127.0.0.1", 0), backlog=8192) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.http_peer", str(listening.fileno())],
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
    """Open a client that has no limits of connections or time."""
    import aiohttp

    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def ask(ids: list[int]) -> Answer:
            body = _encode(Request(ids, TOKENS, True))
            async with session.post(url, data=body, headers=headers) as response:
                return _decode_answer(await response.read())

        yield ask


async def _app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    request = _decode_request(body)
    answer = _encode(Answer(request.input_ids[: request.max_new_tokens], LOGPROBS))
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, length]})
    await send({"type": "http.response.body", "body": answer})


def _serve(file: int) -> None:
    import uvicorn

    config = uvicorn.Config(
        _app,
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=8192,
        # With the default of 5 s, a slow machine loses connections with 4,096 calls in flight.
        timeout_keep_alive=600,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=file)])


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
