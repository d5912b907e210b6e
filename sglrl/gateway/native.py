"""Endpoints of SGLang and vLLM that sample nothing: abort, tokenize, and what a benchmark needs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import InvalidRequest
from .dialect import decode_body, encode, openai_error
from .errors import HttpError
from .sglang_generate import sglang_error
from .tokens import CONVERTING, Convert

if TYPE_CHECKING:
    from .app import Endpoints


class _Abort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool | None = None


class _AbortSeveral(msgspec.Struct, frozen=True):
    request_ids: list[str]


class NativeEndpoints:
    """Answers the requests.

    Args:
        endpoints: of the same gateway. They read bodies and check keys.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    def routes(self) -> list[Route]:
        sglang: list[tuple[str, Any, list[str]]] = [
            ("/abort_request", self.abort, ["POST"]),
            ("/flush_cache", self.flush_cache, ["GET", "POST"]),
            ("/get_model_info", self.model_info, ["GET"]),
            ("/model_info", self.model_info, ["GET"]),
        ]
        openai: list[tuple[str, Any, list[str]]] = [
            ("/inference/v1/abort_requests", self.abort_several, ["POST"]),
            *[(path, partial(self.convert, with_), ["POST"]) for path, with_ in CONVERTING.items()],
        ]
        route = self._endpoints._route
        return [
            Route(path, route(handler, error), methods=methods)
            for table, error in ((sglang, sglang_error), (openai, openai_error))
            for path, handler, methods in table
        ]

    async def abort(self, request: Request) -> Response:
        """SGLang's: abort the running requests with an id, or all of them."""
        session = self._endpoints._session_of(request)
        given = decode_body(await self._endpoints._body(request), _Abort)
        if not (given.rid or given.abort_all):
            raise InvalidRequest("give the rid of a request, or abort_all=true")
        rid = None if given.abort_all else given.rid
        return _json({"aborted": self._endpoints.running.abort(rid, session)})

    async def abort_several(self, request: Request) -> Response:
        """vLLM's: abort the running requests with these ids."""
        session = self._endpoints._session_of(request)
        given = decode_body(await self._endpoints._body(request), _AbortSeveral)
        running = self._endpoints.running
        ids = [id_ for id_ in given.request_ids if id_]
        return _json({"aborted": sum(running.abort(id_, session) for id_ in ids)})

    async def convert(self, convert: Convert, request: Request) -> Response:
        """Tokenize or detokenize."""
        self._endpoints._session_of(request)
        return _json(await convert(self._endpoints.client, await self._endpoints._body(request)))

    async def model_info(self, request: Request) -> Response:
        self._endpoints._session_of(request)
        client = self._endpoints.client
        found = {
            "model_path": client.info.model,
            "tokenizer_path": client.info.model,
            "is_generation": True,
            "weight_version": str(client.weight_version),
        }
        return _json(found)

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix caches. Status 400: an engine has requests and keeps its cache."""
        if self._endpoints._session_of(request) is not None:
            raise HttpError(403, "a session cannot empty the caches of all: use the gateway's key")
        success = await self._endpoints.client.flush_cache()
        return _json({"success": success}, 200 if success else 400)


def _json(content: Any, status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
