"""Route requests between the processes of a gateway that share one port.

The kernel gives each connection to any of the processes. A session lives in one process, and its id
and its key contain the number of that process. A process that receives a request for another
process passes it on over a Unix socket.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, Self

import httpx
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from .access import error_response, json_response, key_of, read_body, unless_disconnected
from .controls import OF_ONE_PROCESS
from .errors import HttpError, error_of
from .metrics import METRICS, merged
from .registry import KEY_PREFIX
from .settings import ProcessPlace, Settings
from .utility_endpoints import ABORTS

_CONNECT_SECONDS: Final = 10.0
_KEEP_SECONDS: Final = 2.0
"""Seconds after which an unused connection is closed. uvicorn would close it after 5 seconds."""
_IN_URL: Final = re.compile(r"/sessions/(\d+)-")
_IN_KEY: Final = re.compile(re.escape(KEY_PREFIX) + r"(\d+)-")
_OF_CONNECTIONS: Final = {b"connection", b"content-length", b"keep-alive", b"transfer-encoding"}
"""Headers that concern a single connection, so they are not passed on."""


class SessionRouter:
    """Passes requests on to the process that must answer them.

    This is an async context manager, and an ASGI application.

    Args:
        app: the application that answers the requests for this process.
        place: the place of this process among the processes of the gateway.
        settings: the limits for bodies of requests.
    """

    def __init__(self, app: Any, place: ProcessPlace, settings: Settings) -> None:
        self._app = app
        self._index = place.index
        self._settings = settings
        self._stack = AsyncExitStack()
        self._clients = [_client(path) for path in place.sockets]

    async def __aenter__(self) -> Self:
        for client in self._clients:
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answering = self._app
        if scope["type"] == "http":
            owner = self._owner(Request(scope))
            if owner != self._index:
                scope = {**scope, "owner": owner}
                answering = await self._passed_on(Request(scope, receive))
        await answering(scope, receive, send)

    def _owner(self, request: Request) -> int | None:
        """Return the number of the process that must answer a request. None: all processes."""
        path = request.scope["path"]
        match = _IN_URL.match(path) or _IN_KEY.match(key_of(request))
        if match is not None:
            owner = int(match[1][:9])
            return owner if owner < len(self._clients) else self._index
        if path in ABORTS or path == METRICS:
            return None
        return 0 if path in OF_ONE_PROCESS else self._index

    async def _passed_on(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return error_response(error_of(error))

    async def _answer(self, request: Request) -> Response:
        body = await read_body(request, self._settings)
        owner = request.scope["owner"]
        if owner is None:
            return await self._from_all(request, body)
        answer = await self._send(owner, request, body)
        made = StreamingResponse(_rest_of(answer), answer.status_code)
        # uvicorn adds its own header with the date.
        made.raw_headers = [
            (name, value)
            for name, value in _end_to_end(answer.headers.raw)
            if name.lower() != b"date"
        ]
        return made

    async def _from_all(self, request: Request, body: bytes) -> Response:
        """Return the answers of all processes as one answer, or the first error."""
        answers = [await self._send(owner, request, body) for owner in range(len(self._clients))]
        bodies = [await answer.aread() for answer in answers]
        for answer, wrong in zip(answers, bodies, strict=True):
            if answer.status_code != 200:
                return Response(wrong, answer.status_code, media_type="application/json")
        if request.scope["path"] == METRICS:
            return Response(
                merged([body.decode() for body in bodies]), media_type=CONTENT_TYPE_LATEST
            )
        return json_response({"aborted": sum(msgspec.json.decode(b)["aborted"] for b in bodies)})

    async def _send(self, owner: int, request: Request, body: bytes) -> httpx.Response:
        """Send a request to a process, and return its answer, whose body has not been read yet.

        Raises:
            HttpError: the process has died.
            ClientDisconnect: the client has disconnected before there was an answer.
        """
        client = self._clients[owner]
        url = request.scope["raw_path"].decode("latin-1")
        if query := request.scope["query_string"].decode("latin-1"):
            url += f"?{query}"
        headers = _end_to_end(request.headers.raw)
        if request.scope["owner"] is None:
            # ``merged`` reads only the default format of the metrics.
            headers = [one for one in headers if one[0] != b"accept"]
        made = client.build_request(request.method, url, headers=headers, content=body)
        try:
            return await unless_disconnected(request, client.send(made, stream=True))
        except httpx.TransportError as error:
            raise HttpError(
                503, f"the gateway's process with this session has died: {error}", "server_error"
            ) from error


def unix_listener(path: str) -> socket.socket:
    """Return a socket bound to a path. It replaces the socket of a process that has died."""
    if os.path.exists(path):
        os.unlink(path)
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    return made


def _client(path: str) -> httpx.AsyncClient:
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_SECONDS
    )
    return httpx.AsyncClient(
        base_url="http://neighbour",
        transport=httpx.AsyncHTTPTransport(uds=path, limits=limits),
        # There is no read timeout, because a turn may take hours. If the process dies, the
        # connection ends.
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
    )


def _end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _OF_CONNECTIONS]


async def _rest_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
