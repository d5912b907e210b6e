"""The routes of the gateway: an ASGI application.

A request belongs to a session if its URL begins with ``/sessions/<id>``, or if its API key is that
of a session. Other requests are sampled alone.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from ..errors import (
    Closed,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    UsageError,
    WorkerLost,
)
from ..inference.client import Client
from ..inference.completion import Completion
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from ..wire.engine import TokenChunk
from .chat import Answer, ChatRequest, parse
from .conversations import Turn, sample_alone
from .deltas import Deltas, Part
from .registry import KEY_PREFIX, OpenSession, Registry
from .settings import Settings

_T = TypeVar("_T")
logger = logging.getLogger("sglrl.gateway")

_encode = msgspec.json.Encoder(enc_hook=str).encode
_RETRY_SECONDS = 1
_STATUS: Sequence[tuple[type[Exception], int, str]] = (
    (MessageTooLarge, 413, "invalid_request_error"),
    (UsageError, 400, "invalid_request_error"),
    (Overloaded, 429, "rate_limit_error"),
    (DeadlineExceeded, 504, "server_error"),
    (EngineError, 500, "server_error"),
    (WorkerLost, 503, "server_error"),
    (Closed, 503, "server_error"),
)


class HttpError(Exception):
    """An error that the client gets.

    Args:
        status: of HTTP.
        kind: OpenAI's ``error.type``.
        code: OpenAI's ``error.code``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code


def error_of(error: Exception) -> HttpError:
    """Return what a client gets for an error of ours."""
    if isinstance(error, HttpError):
        return error
    for type_, status, kind in _STATUS:
        if isinstance(error, type_):
            full = str(error).startswith("the context is full")
            code = "context_length_exceeded" if full else None
            # The end of some messages names methods of Python.
            return HttpError(status, str(error).partition("; see Session.")[0], kind, code)
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "internal error; the log of the gateway has its stack", "server_error")


def error_response(error: HttpError) -> Response:
    body = {"message": str(error), "type": error.kind, "param": None, "code": error.code}
    headers = {"retry-after": str(_RETRY_SECONDS)} if error.status == 429 else {}
    return _json({"error": body}, error.status, headers)


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, "application/json")


class Endpoints:
    """Answers HTTP requests with turns of a pool's engines.

    Args:
        client: of the pool.
        registry: the open sessions.
        shows_tools: the model's chat template writes tools into prompts.
    """

    def __init__(
        self, client: Client, registry: Registry, settings: Settings, shows_tools: bool = True
    ) -> None:
        self.client = client
        self.registry = registry
        self.settings = settings
        self.shows_tools = shows_tools
        self._turns: set[Turn] = set()
        api = [
            Route("/v1/models", self._route(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._route(self.model), methods=["GET"]),
            Route("/v1/chat/completions", self._route(self.chat), methods=["POST"]),
        ]
        self.app = Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/sessions", self._route(self.open_session), methods=["POST"]),
                Route("/sessions/{session}", self._route(self.end_session), methods=["DELETE"]),
                Route("/sessions/{session}/reward", self._route(self.reward), methods=["POST"]),
                Mount("/sessions/{session}", routes=api),
                *api,
            ],
            exception_handlers={404: _not_found, 405: _not_found},
        )

    def _route(self, handler: Any) -> Any:
        async def run(request: Request) -> Response:
            try:
                made: Response = await handler(request)
                return made
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return error_response(error_of(error))

        return run

    def close(self) -> None:
        """End all running turns: their clients get an error."""
        for turn in self._turns:
            turn.task.cancel()

    # --- endpoints --------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def models(self, request: Request) -> Response:
        self._session_of(request)
        return _json({"object": "list", "data": [_model(name) for name in self.settings.names]})

    async def model(self, request: Request) -> Response:
        self._session_of(request)
        return _json(_model(self._known(request.path_params["model"])))

    def _known(self, model: str) -> str:
        """Return the name of a model. Raise ``HttpError`` if it is none."""
        if model in self.settings.names:
            return model
        known = ", ".join(self.settings.names)
        what = f"there is no model {model!r}" if model else "the field 'model' is missing"
        raise HttpError(404, f"{what}; there is: {known}", code="model_not_found")

    async def chat(self, request: Request) -> Response:
        session = self._session_of(request)
        body = await self._body(request)
        parsed = parse(body)
        if session is None:
            self._known(parsed.model)
        if parsed.template()["tools"] and not self.shows_tools:
            raise InvalidRequest("the chat template of this model shows no tools: omit tools")
        answer = Answer(
            f"chatcmpl-{secrets.token_hex(12)}",
            int(time.time()),
            parsed.model or self.settings.names[0],
            parsed,
            f"call_{secrets.token_hex(4)}_" if session is None else "",
        )
        text = _Text(parsed)
        if session is None:
            turn = sample_alone(self.client, parsed, text.add)
        else:
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            digest = blake2b(body, digest_size=16).digest()
            keeps = self.settings.keep_disconnected
            turn = session.conversations.sample(parsed, digest, again, keeps, text.add)
        turn.task.add_done_callback(text.end)
        self._turns.add(turn)
        turn.task.add_done_callback(lambda task: self._turns.discard(turn))
        with ExitStack() as stack:
            stack.enter_context(turn)
            stack.enter_context(_Using(session))
            if not parsed.stream:
                completions = await _unless_disconnected(request, turn)
                turn.delivered = True
                return _json(answer.whole(completions))
            # Until there is text, an error has a status of its own.
            await text.begun()
            if turn.failed:
                await turn.result()
            stream = self._stream(answer, turn, text, stack.pop_all())
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _stream(
        self, answer: Answer, turn: Turn, text: _Text, stack: ExitStack
    ) -> AsyncIterator[bytes]:
        """Yield the events of an answer. If the client disconnects, this is closed."""
        try:
            with stack:
                for index in range(answer.request.choices):
                    yield _event(answer.begin(index))
                async for part, added in text:
                    yield _event(answer.text(0, part, added))
                completions = await turn.result()
                for index, completion in enumerate(completions):
                    for chunk in answer.end(index, completion, {} if index else text.sent):
                        yield _event(chunk)
                if answer.request.usage_at_end:
                    yield _event(answer.usage(completions))
                turn.delivered = True
        except Exception as error:
            failed = error_of(error)
            yield _event({"error": {"message": str(failed), "type": failed.kind}})
        yield b"data: [DONE]\n\n"

    async def open_session(self, request: Request) -> Response:
        self._check_key(_key_of(request))
        body = await self._body(request)
        given = _object(body, _NewSession)
        session = self.registry.open(given.metadata, given.reward_weights)
        url = str(request.base_url).rstrip("/") + f"/sessions/{session.id}/v1"
        return _json({"id": session.id, "base_url": url, "api_key": session.key}, 201)

    async def end_session(self, request: Request) -> Response:
        session = self._session_of(request)
        assert session is not None
        await self.registry.end(session)
        made = session.conversations.trajectory()
        leaves = () if made is None else made.leaves
        return _json({"id": session.id, "trajectories": [_row_of(leaf) for leaf in leaves]})

    async def reward(self, request: Request) -> Response:
        session = self._session_of(request)
        assert session is not None
        given = _object(await self._body(request), _Reward)
        session.conversations.reward(given.reward, given.name, given.tool_call_id)
        return _json({"id": session.id})

    # --- keys and bodies --------------------------------------------------------------------------

    def _session_of(self, request: Request) -> OpenSession | None:
        """Return the session of a request, or None if it has none.

        Raises:
            HttpError: the key is wrong, or the session has ended.
        """
        key, id_ = _key_of(request), request.path_params.get("session")
        if id_ is not None:
            found = self.registry.by_id(id_)
            if found is None:
                raise HttpError(404, f"there is no session {id_!r}, or it has ended")
            if not hmac.compare_digest(key.encode(), found.key.encode()):
                self._check_key(key)
            found.used = asyncio.get_running_loop().time()
            return found
        if key.startswith(KEY_PREFIX):
            found = self.registry.by_key(key)
            if found is None:
                raise HttpError(
                    401,
                    "the session of this key has ended",
                    "authentication_error",
                    "invalid_api_key",
                )
            found.used = asyncio.get_running_loop().time()
            return found
        self._check_key(key)
        return None

    def _check_key(self, key: str) -> None:
        wanted = self.settings.api_key
        if wanted and not hmac.compare_digest(key.encode(), wanted.encode()):
            raise HttpError(401, "the API key is wrong", "authentication_error", "invalid_api_key")

    async def _body(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            HttpError: it is too long, or takes too long.
        """
        most = self.settings.max_body_bytes
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise HttpError(413, f"the body has more than {most:,} bytes")
                    parts.append(part)
        except TimeoutError:
            raise HttpError(
                408, f"the body took longer than {self.settings.body_seconds:g} s"
            ) from None
        return b"".join(parts)


def _row_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON. The arrays are those of ``Trajectory``."""
    arrays = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
    return {
        **{name: getattr(trajectory, name).tolist() for name in arrays},
        "turns": msgspec.to_builtins(trajectory.turns),
        "reward": trajectory.reward,
        "named_rewards": trajectory.named_rewards,
        "metadata": trajectory.metadata,
        "messages": trajectory.messages,
    }


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "sglrl"}


class _NewSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: dict[str, Any] = {}
    reward_weights: dict[str, float] | None = None


class _Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reward: float | dict[str, float]
    name: str = ""
    tool_call_id: str | None = None


class _Using:
    """Counts a running request of a session, so that it does not expire meanwhile."""

    def __init__(self, session: OpenSession | None) -> None:
        self._session = session

    def __enter__(self) -> None:
        if self._session is not None:
            self._session.requests += 1

    def __exit__(self, *exc: object) -> None:
        if self._session is not None:
            self._session.requests -= 1
            self._session.used = asyncio.get_running_loop().time()


class _Text:
    """The text of a turn as it arrives, for a stream."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._parts: list[tuple[Part, str]] = []
        self._arrived = asyncio.Event()
        self._ended = False
        self._deltas: Deltas | None = None

    @property
    def sent(self) -> dict[Part, str]:
        """The text of each part of the message so far."""
        return {} if self._deltas is None else self._deltas.sent

    def add(self, spec: SessionSpec, chunk: TokenChunk) -> None:
        """Add new tokens."""
        if self._deltas is None:
            self._deltas = Deltas(spec, spec.prepare(self._request.sampling()).params)
        if parts := self._deltas.add(chunk):
            self._parts += parts
            self._arrived.set()

    def end(self, task: asyncio.Task[Any]) -> None:
        self._ended = True
        self._arrived.set()

    async def begun(self) -> None:
        """Wait for the first text, or the end."""
        await self._arrived.wait()

    async def __aiter__(self) -> AsyncIterator[tuple[Part, str]]:
        while True:
            await self._arrived.wait()
            parts, self._parts = self._parts, []
            if not self._ended:
                self._arrived.clear()
            elif not parts:
                return
            for part in parts:
                yield part


def _key_of(request: Request) -> str:
    """Return the API key of a request, or ""."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return str(key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))


async def _unless_disconnected(request: Request, turn: Turn) -> list[Completion]:
    """Wait for an answer.

    Raises:
        ClientDisconnect: the client has disconnected before.
    """
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((turn.task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not turn.task.done():
            raise ClientDisconnect
        return await turn.result()
    finally:
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    """Return when the client disconnects. The body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _object(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is wrong: {error}") from None


def _event(content: Any) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = f"{request.method} {request.url.path}"
    return error_response(HttpError(status, f"there is no endpoint {what}"))
