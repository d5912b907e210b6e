"""``sglrl top --web``: textual-serve for those who know the address."""

from __future__ import annotations

import hmac
import secrets
from typing import Any, Final

from aiohttp import web
from rich.console import Console
from textual_serve.server import Server

_HEADERS: Final = {
    # The template of textual-serve names a font of another site. The page looks the same without.
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' data:; connect-src 'self' ws:",
    "Referrer-Policy": "no-referrer",
}


class GuardedServer(Server):  # type: ignore[misc]
    """Serves only browsers that have opened the address with the key.

    Other users of this machine and other web sites do not know the key. The page keeps it in a
    cookie that a browser does not send with requests of other sites.
    """

    def __init__(self, command: str, host: str, port: int, title: str) -> None:
        super().__init__(command, host=host, port=port, title=title)
        self._key = secrets.token_urlsafe(16)
        self._cookie = f"sglrl_top_{port}"

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard)
        return app

    @web.middleware  # type: ignore[untyped-decorator]
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.query.get("key") or request.cookies.get(self._cookie, "")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise web.HTTPForbidden(text="open the address that sglrl top has printed")
        response: web.StreamResponse = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
            response.set_cookie(self._cookie, self._key, httponly=True, samesite="Strict")
        return response

    async def on_startup(self, app: web.Application) -> None:
        url = f"{self.public_url}/?key={self._key}"
        Console().print(f"sglrl top: {url}  (Ctrl-C ends it)", soft_wrap=True, highlight=False)
