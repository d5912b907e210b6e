"""The routes of the gateway: an ASGI application.

A request belongs to a session if its URL begins with ``/sessions/<id>``, if its API key is the key
of a session, or if a session accepts its header ``X-Session-ID``. All other requests are sampled
without a session.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount

from .. import tracing
from ..client.client import Client
from ..errors import InvalidRequest
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from ..wire.codec import malformed
from .access import Access, error_response, json_response, key_of, unless_disconnected
from .anthropic import ANTHROPIC, COUNT_PATH
from .chat import CHAT, CHAT_TOKENS
from .completions import COMPLETIONS
from .controls import ControlEndpoints
from .conversations import Turn, sibling
from .dialect import Body, Dialect, TurnRequest, openai_error
from .errors import HttpError, error_of, named
from .filtering import Filtering
from .metrics import METRICS, Metrics
from .openapi import document
from .prompt_logprobs import score_prompts
from .registry import OpenSession, Registry
from .responses import RESPONSES
from .running_turns import RunningTurns
from .settings import Settings
from .sglang_generate import SGLANG_GENERATE
from .stateless import StatelessTurn
from .store import continued
from .streams import StreamedText, StreamedTokens
from .trained_weights import TrainedWeights
from .utility_endpoints import UtilityEndpoints
from .vllm_generate import VLLM_GENERATE

_T = TypeVar("_T")

DIALECTS: Sequence[Dialect] = (
    CHAT,
    CHAT_TOKENS,
    RESPONSES,
    ANTHROPIC,
    COMPLETIONS,
    SGLANG_GENERATE,
    VLLM_GENERATE,
)


class Endpoints:
    """Answers HTTP requests with turns of a pool's engines.

    Args:
        client: the client of the pool.
        registry: the open sessions.
        settings: the settings of the gateway.
        filtering: handles parts of requests that the model cannot be shown. None: a ``Filtering``
            for a model that can be shown all system messages.
    """

    def __init__(
        self,
        client: Client,
        registry: Registry,
        settings: Settings,
        filtering: Filtering | None = None,
    ) -> None:
        self.client = client
        self.registry = registry
        self.settings = settings
        self._filtering = filtering or Filtering(settings.options)
        self._metrics = Metrics(client)
        self.running = RunningTurns(self._metrics)
        self._access = Access(registry, settings, self._metrics)
        self._weights = TrainedWeights(client, settings)
        self.spec = SessionSpec(client.requests)
        """The settings of turns that belong to no session."""
        route = self._access.route
        api = [
            *UtilityEndpoints(client, self._access, self.running).routes(),
            *ControlEndpoints(client, self._access, self._weights).routes(),
            route("/v1/models", self.models, ["GET"]),
            route("/v1/models", self.model, ["GET"], at="/v1/models/{model:path}"),
        ]
        posts: list[tuple[str, Any, Dialect]] = [
            *[(dialect.path, partial(self.turn, dialect), dialect) for dialect in DIALECTS],
            (COUNT_PATH, self.count_tokens, ANTHROPIC),
        ]
        api += [
            route(path, handler, ["POST"], dialect.error, at=at, body=dialect.body)
            for path, handler, dialect in posts
            # The URL of a session ends with /v1, and Anthropic's clients append /v1 to it again.
            for at in (path, "/v1" + path)
        ]
        self._paths = sorted({"/v1/models", *(path for path, *_ in posts)})
        """The paths of the endpoints for agents, which errors about unknown paths suggest."""
        self.app = Starlette(
            routes=[
                route("/health", self.health, ["GET"], public=True),
                route("/openapi.json", self.openapi, ["GET"], public=True),
                route(METRICS, self.metrics, ["GET"], media_type="text/plain"),
                route("/sessions", self.open_session, ["POST"], body=_NewSession),
                route("/sessions/{session}", self.end_session, ["DELETE"]),
                route("/sessions/{session}/reward", self.reward, ["POST"], body=_Reward),
                Mount("/sessions/{session}", routes=api),
                *api,
            ],
            exception_handlers={404: self._not_found, 405: self._not_found},
        )
        self._document = document(self.app.routes, needs_key=bool(settings.api_key))

    def close(self) -> None:
        """End all running turns. Their clients receive an error."""
        self.running.close()
        self._weights.close()

    # --- endpoints --------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return json_response(self._document)

    async def metrics(self, request: Request) -> Response:
        self._access.check_key(key_of(request))
        accept = request.headers.get("accept", "")
        text, type_ = await self._metrics.exposition(accept, len(self.running), len(self.registry))
        return Response(text, headers={"content-type": type_})

    async def models(self, request: Request) -> Response:
        self._access.session_of(request)
        base = self.settings.names[0]
        cards = [self._card(name) for name in self.settings.names]
        cards += [self._card(base, lora.name) for lora in await self.client.list_loras()]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        self._access.session_of(request)
        base, adapter = split_model(request.path_params["model"], self.settings.names)
        self._check_model(base)
        if adapter:
            loaded = [lora.name for lora in await self.client.list_loras()]
            if adapter not in loaded:
                known = ", ".join(map(repr, loaded)) or "none"
                what = f"no adapter {adapter!r} is loaded (loaded: {known})"
                raise HttpError(404, what, code="model_not_found")
        return json_response(self._card(base, adapter))

    def _card(self, base: str, adapter: str = "") -> dict[str, Any]:
        return {
            "id": f"{base}:{adapter}" if adapter else base,
            "object": "model",
            "created": 0,
            "owned_by": "sglrl",
            "root": adapter or base,
            "parent": base if adapter else None,
            "max_model_len": self.client.info.max_total_tokens,
        }

    def _check_model(self, model: str) -> None:
        """Raise ``HttpError`` unless ``model`` is a name of the model."""
        if model in self.settings.names:
            return
        known = ", ".join(self.settings.names)
        what = f"there is no model {model!r}; there is: {known}"
        raise HttpError(404, what, code="model_not_found")

    async def turn(self, dialect: Dialect, request: Request) -> Response:
        """Sample the choices that a request asks for."""
        session = self._access.session_of(request)
        body = await self._access.body(request)
        parsed = dialect.parse(body)
        wanted = self._wanted(session, parsed)
        trace = None if session is None else session.trace
        try:
            with tracing.within(request.headers, trace):
                return await self._sampled(dialect, request, session, body, parsed, wanted)
        except InvalidRequest as error:
            raise named(error, wanted[0].names) from None

    async def _sampled(
        self,
        dialect: Dialect,
        request: Request,
        session: OpenSession | None,
        body: bytes,
        parsed: Body,
        wanted: Sequence[TurnRequest],
    ) -> Response:
        shown = [self._filtering.shown(one) for one in wanted]
        call_ids = f"call_{secrets.token_hex(4)}_" if session is None else ""
        answer: Any = parsed.answer(parsed.model or self.settings.names[0], call_ids)
        streamed: Any = StreamedTokens(wanted) if dialect.tokens else StreamedText(wanted)
        if session is None or not any(map(_samples, wanted)):
            spec = self.spec if session is None else session.conversations.spec
            turn: Turn = StatelessTurn(spec, shown, streamed.add)
        else:
            again = request.headers.get("x-stainless-retry-count", "0") != "0"
            digest = blake2b(dialect.path.encode() + body, digest_size=16).digest()
            keeps = self.settings.keep_disconnected
            turn = session.conversations.sample(shown, digest, again, keeps, streamed.add)
            turn.task.add_done_callback(partial(session.store.add, wanted))
        turn.task.add_done_callback(streamed.arrived.end)
        self.running.add(turn, session, wanted)
        with ExitStack() as stack:
            stack.enter_context(turn)
            stack.enter_context(_Using(session))
            if not wanted[0].stream:
                completions = await unless_disconnected(request, turn.result())
                prompts = [one.prompt_logprobs for one in wanted]
                if any(one is not None for one in prompts):
                    scored = await score_prompts(self.client, prompts, completions)
                    answer = msgspec.structs.replace(answer, scored=scored)
                turn.delivered = True
                return json_response(answer.whole(completions))
            # Before the stream begins, an error can still be sent with its own HTTP status.
            await unless_disconnected(request, streamed.arrived.begun())
            if turn.failed:
                await turn.result()
            names = wanted[0].names
            stream = _stream(answer, turn, streamed, names, stack.pop_all())
        return StreamingResponse(stream, media_type="text/event-stream")

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's prompt. This is an endpoint of Anthropic's API."""
        session = self._access.session_of(request)
        parsed = ANTHROPIC.parse(await self._access.body(request))
        (wanted,) = self._wanted(session, parsed)
        ids = await sibling(self.spec, self._filtering.shown(wanted)).ids()
        return json_response({"input_tokens": len(ids) // 4})

    def _wanted(self, session: OpenSession | None, parsed: Body) -> Sequence[TurnRequest]:
        """Return the turns that a request asks for.

        Raises:
            HttpError: the model or the conversation does not exist.
            InvalidRequest: a field is wrong, or the model cannot be shown a tool.
        """
        model, adapter = split_model(parsed.model or "", self.settings.names)
        if session is None and parsed.model:
            self._check_model(model)
        store = None if session is None else session.store
        wanted = [_with_adapter(continued(one, store), adapter) for one in parsed.turns()]
        for one in wanted:
            self._filtering.check_tools(one)
        return wanted

    async def open_session(self, request: Request) -> Response:
        self._access.check_key(key_of(request))
        body = await self._access.body(request)
        given = _object(body, _NewSession)
        session = self.registry.open(given.metadata, given.reward_weights)
        url = str(request.base_url).rstrip("/") + f"/sessions/{session.id}/v1"
        return json_response({"id": session.id, "base_url": url, "api_key": session.key}, 201)

    async def end_session(self, request: Request) -> Response:
        session = self._access.session_of(request)
        assert session is not None
        await self.registry.end(session)
        made = session.conversations.trajectory()
        leaves = () if made is None else made.leaves
        return json_response({"id": session.id, "trajectories": [_row_of(leaf) for leaf in leaves]})

    async def reward(self, request: Request) -> Response:
        session = self._access.session_of(request)
        assert session is not None
        given = _object(await self._access.body(request), _Reward)
        session.conversations.reward(given.reward, given.name, given.tool_call_id)
        return json_response({"id": session.id})

    async def _not_found(self, request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        self._metrics.answered("other", status)
        path = request.url.path
        what = f"there is no endpoint {request.method} {path}{self._near(path)}"
        wrong = HttpError(status, what)
        answer = error_response(wrong, request.scope.get("error_body", openai_error))
        # The headers of the error name the allowed methods.
        answer.headers.update(getattr(error, "headers", None) or {})
        return answer

    def _near(self, path: str) -> str:
        """Return the end of an error message: the path that was probably meant, or ""."""
        parts = re.match("(/sessions/[^/]+)?(.*)", path)
        assert parts is not None
        before, rest = parts[1] or "", parts[2].rstrip("/")
        if not rest or rest in self._paths:
            return ""
        # Clients append the end of a path to a base URL, and the base URL may lack its /v1.
        meant = sorted((one for one in self._paths if one.endswith(rest)), key=len)
        meant += get_close_matches(rest, self._paths, n=1, cutoff=0.8)
        return f"; did you mean {before}{meant[0]}?" if meant else ""


def split_model(model: str, names: Sequence[str]) -> tuple[str, str]:
    """Split "model:adapter" into the names of the model and of the LoRA adapter, as SGLang does.

    Args:
        model: the name that the client sent.
        names: the names of the model. They may have colons.

    Returns:
        The two parts of ``model`` if the part before a colon is one of ``names``, and the whole is
        not. In all other cases, ``model`` and "".
    """
    bases = [name for name in names if model.startswith(name + ":")]
    if model in names or not bases:
        return model, ""
    base = max(bases, key=len)
    return base, model.removeprefix(base + ":").strip()


def _with_adapter(request: TurnRequest, adapter: str) -> TurnRequest:
    if not adapter:
        return request
    if request.lora not in ("", adapter):
        raise InvalidRequest(
            f"model selects the adapter {adapter!r}, and lora_path {request.lora!r}: omit one"
        )
    return msgspec.structs.replace(request, lora=adapter)


def _row_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory in a form for JSON, with lists in place of arrays."""
    arrays = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions")
    loras = trajectory.lora_versions
    return {
        **{name: getattr(trajectory, name).tolist() for name in arrays},
        "lora_versions": None if loras is None else loras.tolist(),
        "turns": msgspec.to_builtins(trajectory.turns),
        "reward": trajectory.reward,
        "named_rewards": trajectory.named_rewards,
        "metadata": trajectory.metadata,
        "messages": trajectory.messages,
    }


class _NewSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: dict[str, Any] = {}
    reward_weights: dict[str, float] | None = None


class _Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reward: float | bool | dict[str, float | bool]
    name: str = ""
    tool_call_id: str | None = None


class _Using:
    """Counts a request of a session while the request runs, so that the session does not expire."""

    def __init__(self, session: OpenSession | None) -> None:
        self._session = session

    def __enter__(self) -> None:
        if self._session is not None:
            self._session.requests += 1

    def __exit__(self, *exc: object) -> None:
        if self._session is not None:
            self._session.requests -= 1
            self._session.used = asyncio.get_running_loop().time()


def _samples(request: TurnRequest) -> bool:
    """Return whether a request wants new tokens, and not only logprobs of its prompt."""
    return request.sampling.get("max_new_tokens") != 0


async def _stream(
    answer: Any, turn: Turn, streamed: Any, names: Mapping[str, str], stack: ExitStack
) -> AsyncIterator[bytes]:
    """Yield the events of an answer. The iterator is closed if the client disconnects.

    Args:
        answer, streamed: ``Answer`` and ``StreamedText``, or ``TokenAnswer`` and
            ``StreamedTokens``.
        turn: the turn that is sampled.
        names: the names of fields for errors, as in ``TurnRequest``.
        stack: is closed at the end of the stream.
    """
    try:
        with stack:
            yield answer.begin()
            async for event in streamed.events(answer):
                yield event
            completions = await turn.result()
            yield answer.end(completions, streamed.sent)
            turn.delivered = True
    except Exception as error:
        yield answer.failed(error_of(named(error, names)))


def _object(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is wrong: {malformed(error, body)}") from None
