"""The server of the HTTP peer: a bare ASGI application on uvicorn, in its own process.

It receives a socket that already listens. So its client can connect at once and need not poll.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvicorn

from .payload import LOGPROBS


class Request(msgspec.Struct):
    input_ids: list[int]
    max_new_tokens: int
    logprobs: bool


class Answer(msgspec.Struct):
    output_ids: list[int]
    logprobs: list[float]


decode_request = msgspec.json.Decoder(Request).decode
_encode = msgspec.json.Encoder().encode
_HEADERS = [(b"content-type", b"application/json")]


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    request = decode_request(body)
    answer = _encode(Answer(request.input_ids[: request.max_new_tokens], LOGPROBS))
    length = (b"content-length", str(len(answer)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, length]})
    await send({"type": "http.response.body", "body": answer})


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=8192,
        # With the default of 5 s, a slow machine loses connections at 4,096 in flight.
        timeout_keep_alive=600,
    )
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
