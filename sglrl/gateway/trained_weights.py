"""Receive the weights that trainers send with the requests of SGLang's server.

https://docs.sglang.ai/advanced_features/sglang_for_rl.html

A trainer sees the gateway as one rank of its process group. The gateway sends the weights to all
workers through the pool's own channel, so an update reaches either all workers or none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from ..client.client import Client
from ..errors import InvalidRequest
from ..wire.weights import TensorSpec
from .accepted_fields import without_effect
from .dialect import decode_body
from .errors import HttpError
from .settings import Settings

_SECONDS: Final = 300.0
"""Time limit for forming a group and for each update. TorchRL's client has the same limit."""
_MAX_DIGITS: Final = 10
"""Maximum number of digits of a version."""
_UNCHANGED: Final = without_effect("flush_cache", "torch_empty_cache")
"""Fields that have no effect. The prefix cache need not be flushed, because policy versions do not
share its entries."""


class _Join(msgspec.Struct, frozen=True):
    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] | str
    rank_offset: int
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)]
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class _Leave(msgspec.Struct, frozen=True):
    group_name: str = "weight_update_group"


class _Update(msgspec.Struct, frozen=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None

    def specs(self) -> list[TensorSpec]:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidRequest("names, dtypes and shapes must have the same length")
        if any(size < 0 for shape in self.shapes for size in shape):
            raise InvalidRequest("shapes must not be negative")
        rows = zip(self.names, self.dtypes, self.shapes, strict=True)
        return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in rows]


class _FromDisk(msgspec.Struct, frozen=True):
    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


BODIES: Final[dict[str, type[msgspec.Struct]]] = {
    "/init_weights_update_group": _Join,
    "/destroy_weights_update_group": _Leave,
    "/update_weights_from_distributed": _Update,
    "/update_weights_from_disk": _FromDisk,
}
"""For each path, the struct of the request's body."""


class _Member(NamedTuple):
    """The membership of this process in the group of a trainer.

    Attributes:
        group: a ``TrainerGroup``.
        thread: waits for the trainer. No other thread may use the group, except to abort it.
    """

    group: Any
    thread: ThreadPoolExecutor


class TrainedWeights:
    """Joins the groups of trainers, and updates the pool with the weights that they send.

    Weights that arrive while a trainer has paused generation are held. They become live together
    when generation continues.

    Args:
        client: the client of the pool.
        settings: the device and the address from which the gateway sends the weights.
    """

    def __init__(self, client: Client, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._groups: dict[str, _Member] = {}
        self._lock = asyncio.Lock()
        """Each update holds this lock, so that only one update runs."""
        self._paused = False
        self._held: dict[str, Any] = {}
        self._version: int | None = None
        """The version of the held weights."""

    def handlers(self) -> dict[str, Callable[[bytes], Awaitable[Any]]]:
        """Return for each path the function that handles a request's body."""
        handlers = (self._join, self._leave, self._update, self._update_from_disk)
        return dict(zip(BODIES, handlers, strict=True))

    def close(self) -> None:
        for member in self._groups.values():
            member.group.abort()
            member.thread.shutdown(wait=False, cancel_futures=True)

    # --- pauses -----------------------------------------------------------------------------------

    def pausing(self) -> bool:
        """Hold weights until ``resuming`` is called. Return whether they were held before."""
        before, self._paused = self._paused, True
        return before

    async def resuming(self) -> None:
        """Make the held weights live.

        Raises:
            SglrlError: the update failed. The held weights are dropped, and the pause continues.
        """
        async with self._lock:
            held, self._held = self._held, {}
            if held:
                await self._send(held, self._version, "continue")
            self._paused = False

    # --- requests ---------------------------------------------------------------------------------

    async def _join(self, body: bytes) -> Any:
        given = decode_body(body, _Join)
        port = _port(given.master_port)
        await self._leave_group(given.group_name)
        try:
            from ..weights.trainer_group import TrainerGroup
        except ImportError:
            raise InvalidRequest("the gateway's process needs torch for this") from None

        thread = ThreadPoolExecutor(1, thread_name_prefix="sglrl trainer")
        group = await _run(
            thread,
            TrainerGroup,
            given.backend,
            self._settings.weight_device,
            given.master_address,
            port,
            given.rank_offset,
            given.world_size,
            given.group_name,
            _SECONDS,
        )
        self._groups[given.group_name] = _Member(group, thread)
        return _done(f"joined the group as rank {given.rank_offset} of {given.world_size}")

    async def _leave(self, body: bytes) -> Any:
        name = decode_body(body, _Leave).group_name
        if not await self._leave_group(name):
            raise _no_group(name)
        return _done("left the group")

    async def _leave_group(self, name: str) -> bool:
        member = self._groups.pop(name, None)
        if member is None:
            return False
        await _run(member.thread, member.group.close)
        member.thread.shutdown(wait=False)
        return True

    async def _update(self, body: bytes) -> Any:
        given = decode_body(body, _Update, _UNCHANGED)
        specs, version = given.specs(), _version(given.weight_version)
        member = self._groups.get(given.group_name)
        if member is None:
            raise _no_group(given.group_name)
        async with self._lock:
            flat = given.load_format is not None
            weights = await _run(member.thread, partial(member.group.receive, flat=flat), specs)
            if self._paused:
                self._held |= weights
                self._version = version
                return _done("the weights become live when generation continues")
            await self._send(weights, version, _inflight(given.abort_all_requests))
        return self._live()

    def _live(self) -> Any:
        return _done(f"the weights are version {self._client.weight_version}")

    async def _update_from_disk(self, body: bytes) -> Any:
        given = decode_body(body, _FromDisk, _UNCHANGED)
        async with self._lock:
            await self._client.update_weights_from_disk(
                given.model_path,
                version=_version(given.weight_version),
                inflight="continue" if self._paused else _inflight(given.abort_all_requests),
                timeout=_SECONDS,
            )
        return self._live()

    async def _send(self, weights: dict[str, Any], version: int | None, inflight: str) -> None:
        client, settings = self._client, self._settings
        await client.update_weights(
            weights,
            version=version,
            inflight=inflight,
            # This is also right for complete weights, because the pool sees that none are missing.
            partial=True,
            # A trainer that sends buckets gives all of them the version of the update.
            same_version=bool(version) and version == client.weight_version,
            timeout=_SECONDS,
            device="cpu" if client.info.device == "cpu" else settings.weight_device,
            host=settings.weights_host,
        )


async def _run(thread: ThreadPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(thread, work, *arguments)


def _port(given: int | str) -> int:
    """Return a port as a number. AReaL sends it as text, which SGLang's server accepts."""
    text = str(given)
    number = text.isascii() and text.isdecimal() and len(text) <= len("65535")
    if not (number and 1 <= int(text) <= 65_535):
        raise InvalidRequest(f"master_port must be in 1..65535, got {given!r:.80}")
    return int(text)


def _inflight(abort: bool) -> str:
    """Return the value of ``inflight`` for an update.

    SGLang aborts running requests before an update, or lets them finish.
    """
    return "abort" if abort else "drain"


def _version(given: str | None) -> int | None:
    if given is None:
        return None
    if not given.isascii() or not given.isdecimal() or len(given) > _MAX_DIGITS:
        raise InvalidRequest(
            f"weight_version must be a number of at most {_MAX_DIGITS} digits, got {given!r:.200}"
        )
    return int(given)


def _no_group(name: str) -> InvalidRequest:
    return InvalidRequest(f"there is no group {name!r:.200}: use /init_weights_update_group first")


def update_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an answer for an error, as SGLang answers requests about weights."""
    return {"success": False, "message": str(error)}


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}
