"""Endpoints of SGLang and vLLM that sample nothing: abort, tokenize, model info, flush cache."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..client.client import Client
from ..errors import InvalidRequest
from .access import Access, json_response
from .dialect import decode_body
from .errors import HttpError
from .openapi import ApiRoute
from .running_turns import RunningTurns
from .sglang_generate import sglang_error
from .tokens import CONVERTING, Convert

ABORTS: Final = ("/abort_request", "/inference/v1/abort_requests")


class _Abort(msgspec.Struct, frozen=True):
    rid: str | None = None
    abort_all: bool | None = None


class _AbortSeveral(msgspec.Struct, frozen=True):
    request_ids: list[str]


class UtilityEndpoints:
    """Answers requests that abort turns, convert text, describe the model, or flush caches.

    Args:
        client: the client of the pool.
        access: finds the sessions of requests and reads their bodies.
        running: the turns that clients may abort.
    """

    def __init__(self, client: Client, access: Access, running: RunningTurns) -> None:
        self._client = client
        self._access = access
        self._running = running

    def routes(self) -> list[ApiRoute]:
        route = self._access.route
        return [
            route(ABORTS[0], self.abort, ["POST"], sglang_error, body=_Abort),
            route("/flush_cache", self.flush_cache, ["GET", "POST"], sglang_error),
            route("/get_model_info", self.model_info, ["GET"], sglang_error),
            route("/model_info", self.model_info, ["GET"], sglang_error),
            route(ABORTS[1], self.abort_several, ["POST"], body=_AbortSeveral),
            *[
                route(path, partial(self.convert, convert), ["POST"], body=body)
                for path, (convert, body) in CONVERTING.items()
            ],
        ]

    async def abort(self, request: Request) -> Response:
        """Abort the running requests with an id, or all of them. This is SGLang's endpoint."""
        session = self._access.session_of(request)
        given = decode_body(await self._access.body(request), _Abort)
        if not (given.rid or given.abort_all):
            raise InvalidRequest("give the rid of a request, or abort_all=true")
        rid = None if given.abort_all else given.rid
        return json_response({"aborted": self._running.abort(rid, session)})

    async def abort_several(self, request: Request) -> Response:
        """Abort the running requests with the given ids. This is vLLM's endpoint."""
        session = self._access.session_of(request)
        given = decode_body(await self._access.body(request), _AbortSeveral)
        ids = [id_ for id_ in given.request_ids if id_]
        return json_response({"aborted": sum(self._running.abort(id_, session) for id_ in ids)})

    async def convert(self, convert: Convert, request: Request) -> Response:
        """Tokenize or detokenize the text in a request, with the function ``convert``."""
        self._access.session_of(request)
        return json_response(await convert(self._client, await self._access.body(request)))

    async def model_info(self, request: Request) -> Response:
        self._access.session_of(request)
        client = self._client
        info = {
            "model_path": client.info.model,
            "tokenizer_path": client.info.tokenizer or client.info.model,
            "is_generation": True,
            "weight_version": str(client.weight_version),
        }
        return json_response(info)

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix caches. The status is 400 if an engine has requests and keeps its cache.

        All clients share the caches, so the request needs the gateway's key.
        """
        if self._access.session_of(request) is not None:
            raise HttpError(403, "a session cannot empty the caches of all: use the gateway's key")
        success = await self._client.flush_cache()
        return json_response({"success": success}, 200 if success else 400)
