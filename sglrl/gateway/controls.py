"""Endpoints that control the engines: SGLang's, vLLM's, and each operation of ``Client``.

https://docs.sglang.ai/basic_usage/native_api.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..client.client import Client
from ..config import __version__
from ..control.operations import Operation, public_operations
from ..errors import InvalidRequest
from ..wire.engine import SLEEP_TAGS
from .accepted_fields import without_effect
from .access import Access, json_response
from .dialect import decode_body, openai_error
from .errors import HttpError
from .openapi import ApiRoute
from .sglang_generate import sglang_error
from .trained_weights import BODIES, TrainedWeights, update_error

PauseMode = Literal["abort", "retract", "in_place", "drain"]
_VLLM_MODES: Final[dict[str, PauseMode]] = {"abort": "abort", "keep": "retract", "wait": "drain"}
_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
_PAUSE_QUERY: Final = {"mode": list(_VLLM_MODES), "clear_cache": list(_FLAGS)}
_SECONDS: Final = 60.0
_DRAIN_SECONDS: Final = 3600.0
_HEALTH_SECONDS: Final = 20.0
"""Time limits in seconds. ``_SECONDS`` is for a pause, ``_DRAIN_SECONDS`` for a pause that waits
for running requests, and ``_HEALTH_SECONDS`` for ``/health_generate``."""
_UNSUPPORTED: Final = {
    "/update_weights_from_tensor": "its body is a pickle; the trainer calls Client.update_weights",
    "/update_weights_from_ipc": "the trainer calls Client.update_weights",
    "/update_weight_version": "every update has a version; give it weight_version",
}
"""The endpoints of SGLang that are rejected, each with the reason."""
OF_ONE_PROCESS: Final = frozenset(
    {"/pause_generation", "/continue_generation", "/pause", "/resume", *BODIES}
)
"""Endpoints that share state. If the gateway has several processes, only the first answers them."""


class _Pause(msgspec.Struct, frozen=True):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class _Memory(msgspec.Struct, frozen=True):
    tags: list[str] | None = None


class _Adapter(msgspec.Struct, frozen=True):
    lora_name: str


class _AdapterFolder(_Adapter, frozen=True):
    lora_path: Annotated[str, msgspec.Meta(min_length=1)]


class ControlEndpoints:
    """Answers requests that control or inspect the engines.

    A request that changes something needs the gateway's key. The key of a session is not enough.

    Args:
        client: the client of the pool.
        access: finds the sessions of requests and reads their bodies.
        weights: receives the weights of trainers.
    """

    def __init__(self, client: Client, access: Access, weights: TrainedWeights) -> None:
        self._client = client
        self._access = access
        self._weights = weights

    def routes(self) -> list[ApiRoute]:
        read, change, route = self._read, self._change, self._access.route
        reads = [
            ("/health_generate", self._health_generate),
            ("/server_info", self._server_info),
            ("/get_server_info", self._server_info),
            ("/get_load", self._load),
            ("/v1/loads", self._loads),
            ("/weight_version", self._weight_version),
            ("/get_weight_version", self._weight_version),
        ]
        changes: list[tuple[str, Any, Any, Any]] = [
            ("/pause_generation", self._pause_generation, sglang_error, _Pause),
            ("/release_memory_occupation", self._release_memory, sglang_error, _Memory),
            ("/resume_memory_occupation", self._resume_memory, sglang_error, _Memory),
            ("/load_lora_adapter", self._load_adapter, _adapter_error, _AdapterFolder),
            ("/v1/load_lora_adapter", self._load_adapter, _adapter_error, _AdapterFolder),
            ("/unload_lora_adapter", self._unload_adapter, _adapter_error, _Adapter),
            ("/v1/unload_lora_adapter", self._unload_adapter, _adapter_error, _Adapter),
            ("/continue_generation", self._continue_generation, sglang_error, None),
            *[(path, _reject(path, why), sglang_error, None) for path, why in _UNSUPPORTED.items()],
            ("/resume", self._resume, openai_error, None),
            ("/reset_prefix_cache", self._reset_prefix_cache, openai_error, None),
            *[
                (path, self._with_body(handler), update_error, BODIES[path])
                for path, handler in self._weights.handlers().items()
            ],
        ]
        return [
            *[route(path, read(answer), ["GET"], sglang_error) for path, answer in reads],
            route("/get_world_size", read(self._world_size), ["GET"]),
            *[
                route(path, change(handler), ["POST"], error, body=body)
                for path, handler, error, body in changes
            ],
            route("/pause", change(self._pause), ["POST"], query=_PAUSE_QUERY),
            *[
                route(
                    f"/pool/{name}",
                    change(self._operate(spec)),
                    ["POST"],
                    body=spec.fields if spec.signature.parameters else None,
                )
                for name, spec in public_operations(Client).items()
                if spec.http
            ],
        ]

    def _operate(self, operation: Operation) -> Callable[[Request], Awaitable[Any]]:
        """Return a handler that runs an operation of ``Client`` with a request's arguments."""

        async def handler(request: Request) -> Any:
            given = decode_body(await self._access.body(request), operation.fields)
            result = await getattr(self._client, operation.name)(**msgspec.structs.asdict(given))
            return {"result": result}

        return handler

    def _with_body(
        self, handle: Callable[[bytes], Awaitable[Any]]
    ) -> Callable[[Request], Awaitable[Any]]:
        async def handler(request: Request) -> Any:
            return await handle(await self._access.body(request))

        return handler

    def _read(self, answer: Callable[[], Awaitable[Any]]) -> Any:
        async def handler(request: Request) -> Response:
            self._access.session_of(request)
            return json_response(await answer())

        return handler

    def _change(self, change: Callable[[Request], Awaitable[Any]]) -> Any:
        async def handler(request: Request) -> Response:
            if self._access.session_of(request) is not None:
                raise HttpError(403, "a session cannot control the engines: use the gateway's key")
            return json_response(await change(request))

        return handler

    # --- reports of the engines -------------------------------------------------------------------

    async def _health_generate(self) -> dict[str, str]:
        """Sample one token, to test that an engine answers."""
        await self._client.generate(input_ids=[0], max_new_tokens=1, timeout=_HEALTH_SECONDS)
        return {"status": "ok"}

    async def _server_info(self) -> dict[str, Any]:
        client = self._client
        return {
            **msgspec.to_builtins(client.info),
            "model_path": client.info.model,
            # A trainer sees the pool as a single rank.
            "tp_size": 1,
            "dp_size": 1,
            "engine_tp_size": client.info.tp_size,
            "enable_memory_saver": bool(client.info.sleep_tags),
            "enable_return_routed_experts": client.info.routed_experts is not None,
            "replicas": len(client.workers),
            "version": client.info.sglang_version,
            "sglrl_version": __version__,
            "weight_version": str(client.weight_version),
            "internal_states": await self._load(),
        }

    async def _load(self) -> list[dict[str, Any]]:
        return [
            {
                "dp_rank": stats.worker,
                "num_reqs": stats.engine.running + stats.engine.waiting,
                "num_running_reqs": stats.engine.running,
                "num_waiting_reqs": stats.engine.waiting,
                "num_tokens": stats.engine.kv_tokens,
                "num_used_tokens": stats.engine.kv_tokens,
                "max_total_num_tokens": stats.engine.kv_capacity,
                "token_usage": stats.engine.kv_usage,
                "gen_throughput": stats.engine.tokens_per_second,
                "cache_hit_rate": stats.engine.cache_hit_rate,
            }
            for stats in await self._client.stats()
        ]

    async def _loads(self) -> dict[str, Any]:
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": self._client.info.sglang_version,
            "loads": await self._load(),
        }

    async def _weight_version(self) -> dict[str, str]:
        return {"weight_version": str(self._client.weight_version)}

    async def _world_size(self) -> dict[str, int]:
        return {"world_size": 1}

    # --- changes of the engines -------------------------------------------------------------------

    async def _pause_generation(self, request: Request) -> dict[str, str]:
        given = decode_body(await self._access.body(request), _Pause)
        await self._paused(given.mode)
        return {"status": "ok", "message": "generation is paused"}

    async def _continue_generation(self, request: Request) -> dict[str, str]:
        await self._resumed()
        return {"status": "ok", "message": "generation continues"}

    async def _pause(self, request: Request) -> dict[str, str]:
        given = {"mode": "abort", "clear_cache": "true", **request.query_params}
        if unknown := given.keys() - _PAUSE_QUERY.keys():
            raise InvalidRequest(f"{min(unknown)!r:.200} is not supported")
        for name, values in _PAUSE_QUERY.items():
            # Some clients send Python's False.
            given[name] = given[name].lower()
            if given[name] not in values:
                raise InvalidRequest(f"{name} must be one of {values}, got {given[name]!r:.200}")
        mode = _VLLM_MODES[given["mode"]]
        # After "abort" and "wait" no request has KV cache that could be cleared.
        if mode == "retract" and not _FLAGS[given["clear_cache"]]:
            mode = "in_place"
        await self._paused(mode)
        return {"status": "paused"}

    async def _resume(self, request: Request) -> dict[str, str]:
        await self._resumed()
        return {"status": "resumed"}

    async def _paused(self, mode: PauseMode) -> None:
        seconds = _DRAIN_SECONDS if mode == "drain" else _SECONDS
        # Hold weights from now on, because a request to resume may come before the engines are
        # paused.
        before = self._weights.pausing()
        try:
            await self._client.pause(mode, timeout=seconds)
        except InvalidRequest:
            # The engine does not have this mode.
            if not before:
                await self._weights.resuming()
            raise

    async def _resumed(self) -> None:
        await self._weights.resuming()
        await self._client.resume()

    async def _release_memory(self, request: Request) -> dict[str, str]:
        given = decode_body(await self._access.body(request), _Memory)
        await self._client.sleep(given.tags or SLEEP_TAGS)
        return {"status": "ok", "message": "memory was given back"}

    async def _resume_memory(self, request: Request) -> dict[str, str]:
        given = decode_body(await self._access.body(request), _Memory)
        await self._client.wake(given.tags or None)
        return {"status": "ok", "message": "memory was taken again"}

    async def _load_adapter(self, request: Request) -> dict[str, Any]:
        body = await self._access.body(request)
        # The pool never evicts a LoRA adapter, so every value of ``pinned`` has the same effect.
        given = decode_body(body, _AdapterFolder, without_effect("pinned"))
        loaded = await self._client.load_lora(given.lora_name, given.lora_path)
        return {"success": True, "error_message": None, "version": loaded.version}

    async def _unload_adapter(self, request: Request) -> dict[str, Any]:
        given = decode_body(await self._access.body(request), _Adapter)
        await self._client.unload_lora(given.lora_name)
        return {"success": True, "error_message": None}

    async def _reset_prefix_cache(self, request: Request) -> dict[str, bool]:
        if not await self._client.flush_cache():
            raise InvalidRequest("an engine has requests and keeps its cache")
        return {"success": True}


def _adapter_error(error: HttpError) -> dict[str, Any]:
    return {"success": False, "error_message": str(error)}


def _reject(path: str, why: str) -> Callable[[Request], Awaitable[Any]]:
    async def handler(request: Request) -> Any:
        raise InvalidRequest(f"{path} is not supported: {why}")

    return handler
