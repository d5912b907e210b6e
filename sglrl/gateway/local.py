"""A gateway that runs in this process and answers requests with the engines of a client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import msgspec

from ..client.client import Client
from ..config import GatewayOptions
from ..control.snapshot import GatewaySnapshot
from ..driver.threads import in_thread
from ..inference.chat_templates import template_shows_system
from ..inference.prompts import load_tokenizer
from ..sessions.session import Session
from ..transport.http_listeners import bound
from .app import Endpoints
from .filtering import Filtering
from .registry import Registry
from .server import serve_app
from .settings import ProcessPlace, Settings, names_of


class LocalGateway:
    """A running gateway: an async context manager.

    Args:
        client: the client of the pool.
        settings: the settings of the gateway. Port 0 is any free port.
        place: the place of this process, if the gateway has several processes.

    Attributes:
        registry: the open sessions.
        url: the URL of the gateway.
    """

    registry: Registry
    url: str

    def __init__(
        self, client: Client, settings: Settings, place: ProcessPlace | None = None
    ) -> None:
        self._client = client
        self.position = place or ProcessPlace()
        self._settings = settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        client, settings = self._client, self._settings
        # Loading the tokenizer takes seconds. The first request should not wait for it.
        box = client.requests.box
        await load_tokenizer(box)
        shows_system = await in_thread(template_shows_system, box)
        self.registry = Registry(
            client,
            expire_after=settings.expire_after,
            most=settings.max_sessions,
            process=self.position.index,
        )
        filtering = Filtering(settings.options, shows_system)
        endpoints = Endpoints(client, self.registry, settings, filtering)
        listener = bound(settings.host, settings.port)
        self.url = settings.url(listener.getsockname()[1])
        app: Any = endpoints.app
        if self.position.sockets:
            from .session_router import SessionRouter, unix_listener

            inner = unix_listener(self.position.sockets[self.position.index])
            plain = msgspec.structs.replace(settings, tls_cert="", tls_key="")
            await self._stack.enter_async_context(serve_app(app, plain, inner))
            router = SessionRouter(app, self.position, settings)
            app = await self._stack.enter_async_context(router)
        await self._stack.enter_async_context(serve_app(app, settings, listener))
        # On exit, the running turns end first, so that their clients receive an answer.
        self._stack.push_async_callback(self.registry.close)
        self._endpoints = endpoints
        client.observed.gateways.append(self.snapshot)
        self._stack.callback(client.observed.gateways.remove, self.snapshot)
        self._stack.callback(endpoints.close)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def snapshot(self) -> GatewaySnapshot:
        """Return the state of the gateway, for ``Client.snapshot``."""
        return GatewaySnapshot(
            url=self.url,
            running=len(self._endpoints.running),
            sessions=self.registry.snapshots(),
        )

    @asynccontextmanager
    async def lend(self, session: Session) -> AsyncIterator[None]:
        """Let HTTP requests use a session while the block runs. Then end its running turns."""
        opened = [self.registry.add(session)]

        def name(named: Any, header: str) -> None:
            opened.append(self.registry.add(named, header))

        session.lend((f"{self.url}/sessions/{opened[0].id}/v1", opened[0].key), name)
        try:
            yield
        finally:
            session.lend(None, None)
            await asyncio.gather(*[self.registry.end(one) for one in opened])


def local_gateway(client: Client, options: bool | GatewayOptions = True) -> LocalGateway:
    """Return a gateway for sessions of this process. The sessions do not expire."""
    own = options if isinstance(options, GatewayOptions) else GatewayOptions()
    settings = Settings(names=names_of(client.model), expire_after=math.inf, options=own)
    return LocalGateway(client, settings)
