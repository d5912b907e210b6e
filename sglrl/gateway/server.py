"""Serve an ASGI application at an address, with uvicorn on the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import uvicorn

from .protocol import LimitedProtocol
from .settings import Settings

_SHUTDOWN_SECONDS = 2


class _Server(uvicorn.Server):  # type: ignore[misc]
    """A server that handles no signals.

    Attributes:
        listening: is set when clients can connect.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The process that runs the server handles signals itself.
        yield


@contextlib.asynccontextmanager
async def serve_app(app: Any, settings: Settings, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an application while the block runs. Close the socket afterwards.

    Args:
        app: the ASGI application.
        settings: the limits and the TLS files of the gateway.
        listener: a socket that is bound to the address of the server.
    """
    config = uvicorn.Config(
        app,
        http=partial(LimitedProtocol, seconds=settings.body_seconds),
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )
    server = _Server(config)
    task = asyncio.ensure_future(server.serve([listener]))
    listening = asyncio.ensure_future(server.listening.wait())
    try:
        await asyncio.wait((task, listening), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        yield
    finally:
        listening.cancel()
        server.should_exit = True
        await task
        listener.close()
