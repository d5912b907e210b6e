"""Check the keys of requests, read their bodies, and answer with errors."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .. import tracing
from .dialect import encode, openai_error
from .errors import RETRY_SECONDS, HttpError, error_of
from .metrics import Metrics
from .openapi import ApiRoute
from .registry import KEY_PREFIX, OpenSession, Registry
from .settings import Settings

_T = TypeVar("_T")
Handler = Callable[[Request], Awaitable[Response]]


class Access:
    """Finds the session of each request, checks its key, reads its body, and counts the request.

    Args:
        registry: the open sessions.
        settings: the gateway's key and limits.
        metrics: counts the requests.
    """

    def __init__(self, registry: Registry, settings: Settings, metrics: Metrics) -> None:
        self._registry = registry
        self._settings = settings
        self._metrics = metrics

    def route(
        self,
        path: str,
        handler: Handler,
        methods: Sequence[str],
        error: Callable[[HttpError], Any] = openai_error,
        *,
        at: str = "",
        **described: Any,
    ) -> ApiRoute:
        """Return a route that counts requests, and answers with an error if ``handler`` raises.

        Args:
            path: the path by which the metrics count the requests.
            handler: answers the requests.
            methods: the HTTP methods of the endpoint.
            error: makes the body of an answer from an error.
            at: the path of the endpoint. "": ``path``.
            **described: the other arguments of ``ApiRoute``.
        """

        async def run(request: Request) -> Response:
            try:
                with tracing.within(request.headers):
                    response = await handler(request)
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as failure:
                response = error_response(error_of(failure), error)
            self._metrics.answered(path, response.status_code)
            return response

        return ApiRoute(at or path, run, methods, error=error, **described)

    def session_of(self, request: Request) -> OpenSession | None:
        """Return the session of a request. None: the request belongs to no session.

        Raises:
            HttpError: the key is wrong, or the session does not exist or has ended.
        """
        key, id_ = key_of(request), request.path_params.get("session")
        if id_ is not None:
            opened = self._registry.by_id(id_)
            if opened is None:
                raise HttpError(404, f"there is no session {id_!r}, or it has ended")
            if not hmac.compare_digest(key.encode(), opened.key.encode()):
                self.check_key(key)
        elif key.startswith(KEY_PREFIX):
            opened = self._registry.by_key(key)
            if opened is None:
                raise HttpError(
                    401,
                    "the session of this key has ended",
                    "authentication_error",
                    "invalid_api_key",
                )
        else:
            opened = self._registry.by_header(request.headers.get("x-session-id", ""))
            if opened is None:
                self.check_key(key)
                return None
        opened.used = asyncio.get_running_loop().time()
        return opened

    def check_key(self, key: str) -> None:
        wanted = self._settings.api_key
        if wanted and not hmac.compare_digest(key.encode(), wanted.encode()):
            raise HttpError(401, "the API key is wrong", "authentication_error", "invalid_api_key")

    async def body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            HttpError: the body is too large, or takes too long to arrive.
        """
        return await read_body(request, self._settings)


async def read_body(request: Request, settings: Settings) -> bytes:
    """Return the body of a request, as ``Access.body`` does."""
    most, seconds = settings.max_body_bytes, settings.body_seconds
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise HttpError(413, f"the body has more than {most:,} bytes")
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, f"the body took longer than {seconds:g} s") from None
    return b"".join(parts)


async def unless_disconnected(request: Request, answer: Coroutine[Any, Any, _T]) -> _T:
    """Wait for an answer, or for the start of a stream, unless the client disconnects.

    The body of the request must have been read before.

    Raises:
        ClientDisconnect: the client has disconnected before there was an answer.
    """
    waiting = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise ClientDisconnect
        return waiting.result()
    finally:
        waiting.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def key_of(request: Request) -> str:
    """Return the API key of a request, or ""."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return str(key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))


def error_response(error: HttpError, body: Any = openai_error) -> Response:
    """Return the answer for an error.

    Args:
        error: the error.
        body: makes the body of the answer from the error.
    """
    headers = {"retry-after": str(RETRY_SECONDS)} if error.status == 429 else {}
    if error.status == 408:
        # The rest of the request is not read, so the connection cannot be used again.
        headers = {"connection": "close"}
    return json_response(body(error), error.status, headers)


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return an answer with a JSON body."""
    return Response(encode(content), status, headers, "application/json")
