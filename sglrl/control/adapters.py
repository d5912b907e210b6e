"""The LoRA adapters of a pool: load, replace and unload them on all workers.

A load or a replacement has two phases. First all workers receive and prepare the adapter. Only then
do all workers make it live. If one worker cannot prepare it, all workers discard it.

The driver keeps every adapter. A worker that starts later receives all adapters before its first
call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from ..actors.actor import EndpointSpec, endpoint, endpoints_of
from ..config import check_timeout
from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..core.policy_versions import MODEL
from ..driver.driver import Driver
from ..driver.pool import Pool
from ..driver.threads import in_thread
from ..errors import (
    Closed,
    EngineError,
    UnknownAdapter,
    UsageError,
    WorkerLost,
)
from ..weights.adapter_config import AdapterConfig
from ..weights.deadline import Deadline, turn
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateRequest
from ..weights.verification import BaseCheck
from ..wire.adapters import LoraCommit, LoraInfo, LoraKeep, LoraPart, LoraPrepare
from ..wire.codec import encode
from ..wire.engine import EngineInfo
from ..wire.weights import ModelDescription
from .client_base import ClientBase
from .engine_calls import urgent_call
from .operations import operation

logger = logging.getLogger("sglrl.weights")

_COMMIT_SECONDS: Final = 1.0
"""Minimum time in seconds that a worker has to commit or to unload an adapter."""
_LONGEST_NAME: Final = 256
_INFLIGHT: Final = ("continue", "retract", "abort")


class LoraMethods(ClientBase):
    """The methods of ``Client`` that load and unload LoRA adapters."""

    @property
    def loras(self) -> dict[str, LoraInfo]:
        """The loaded adapters by name.

        Raises:
            UsageError: another process has launched the pool. Await ``list_loras`` there.
        """
        return dict(self._control.adapters.loaded)

    @property
    def policy_versions(self) -> dict[str, int]:
        """The current version of each adapter by its name, and of the model by the name "".

        A client in another process knows the versions from the pool's latest message.
        """
        return {MODEL: self.pool.weights.version, **self._control.adapters.versions}

    @operation(urgent=True)
    async def list_loras(self) -> list[LoraInfo]:
        """Return the loaded adapters. Unlike ``loras``, this works in every process."""
        return [*self._control.adapters.loaded.values()]

    @operation
    async def load_lora(
        self,
        name: str,
        adapter: str | os.PathLike[str] | Any,
        *,
        config: Any = None,
        timeout: float = 60.0,
    ) -> LoraInfo:
        """Load a LoRA adapter on all workers, for ``generate(..., lora=name)``.

        Workers that start later load the adapter before they serve. ``update_weights(...,
        lora=name)`` replaces the adapter. Requests with different adapters, and requests without
        one, run in the same batch. Each version of an adapter has a KV cache of its own.

        The engine must be launched with ``enable_lora=True``, ``max_lora_rank=`` and
        ``lora_target_modules=``, or with ``lora_paths=``. A client of ``sglrl.connect`` can load
        only folders. The process that launched the pool must be able to read them.

        Args:
            name: the adapter's name, a text of 1 to 256 characters.
            adapter: a folder that PEFT saved (``adapter_config.json``,
                ``adapter_model.safetensors``), a ``PeftModel``, or the adapter's tensors by PEFT's
                names: a mapping, a TensorDict or an iterable of (name, tensor).
            config: PEFT's ``LoraConfig``, or a mapping of its fields. ``r`` and ``lora_alpha`` are
                required. The names of the tensors tell the engine which modules have the adapter.
                Fields of ``config`` that select modules must select all of these modules. None: use
                the configuration in the folder or in the ``PeftModel``.
            timeout: seconds from this call until all workers must have prepared the adapter.

        Raises:
            InvalidAdapter: the configuration is missing or not supported, names, shapes or the
                rank do not fit the engine, or the engine would not compute the same as the
                ``PeftModel``. No worker has the adapter.
            InvalidWeights: a value is not finite.
            UsageError: the name is in use, the engine takes no adapters, or ``max_loaded_loras``
                adapters are already loaded.
            DeadlineExceeded, UpdateInProgress: the load took too long. No worker has the adapter.
            WorkerLost: no worker is left.
        """
        return await self._control.part(PoolAdapters).load(name, adapter, config, timeout)

    @operation
    async def unload_lora(self, name: str, *, timeout: float = 60.0) -> None:
        """Unload an adapter on all workers.

        New calls with this adapter raise ``UnknownAdapter`` at once. Running calls with the adapter
        end with ``UnknownAdapter``.

        Args:
            timeout: seconds from this call until the workers must have unloaded the adapter. A
                worker that is late is killed, and replaced by a worker without the adapter.

        Raises:
            UnknownAdapter: no adapter of this name is loaded.
            UpdateInProgress: another load, replacement or unload was still running after
                ``timeout`` seconds.
        """
        await self._control.part(PoolAdapters).unload(name, timeout)


class LoraEndpoints(Protocol):
    """Endpoints of an engine worker. ``wire/adapters.py`` documents their arguments."""

    @endpoint
    async def lora_part(self) -> None: ...

    @endpoint
    async def lora_prepare(self) -> None: ...

    @endpoint
    async def lora_commit(self) -> float: ...

    @endpoint
    async def lora_keep(self) -> None: ...


_SPECS: Final[dict[str, EndpointSpec]] = endpoints_of(LoraEndpoints)


class _Order(NamedTuple):
    """A call that all workers receive: the endpoint, its encoded arguments and its raw frames."""

    name: str
    args: Raw
    frames: Sequence[memoryview] = ()


class _Loaded(msgspec.Struct, frozen=True):
    """An adapter that all workers have, and the calls that bring it to another worker."""

    info: LoraInfo
    serial: int
    calls: list[_Order]


class PoolAdapters(DriverListener):
    """The adapters of this process's pool.

    Args:
        pool: the pool of workers that load the adapters.
        initial: the folders of the adapters to load at the start, by the adapters' names.
    """

    def __init__(self, pool: Pool, initial: Mapping[str, Any] | None = None) -> None:
        self._pool = pool
        self._expel = pool.expel
        self._initial = initial or {}
        self._driver: Driver
        self._info: EngineInfo
        self._base_check = BaseCheck(pool.weights)
        self._loaded: dict[str, _Loaded] = {}
        self.versions: dict[str, int] = {}
        self._serial = 0
        self._lock = asyncio.Lock()
        self._prepared: set[int] = set()
        """Workers that have prepared the adapter of the running load."""

    @property
    def loaded(self) -> Mapping[str, LoraInfo]:
        return {name: one.info for name, one in self._loaded.items()}

    async def start(self) -> None:
        assert self._pool.engine is not None
        self._driver, self._info = self._pool.driver, self._pool.engine
        self._driver.add_listener(self)
        for name, folder in self._initial.items():
            await self.load(name, folder, None, 600.0)

    def check(self, name: Any) -> str:
        if not isinstance(name, str):
            raise UnknownAdapter(f"lora must be the name of an adapter, got {name!r}")
        if name not in self._loaded:
            known = ", ".join(map(repr, self._loaded)) or "none"
            raise UnknownAdapter(f"no adapter {name!r} is loaded (loaded: {known}); use load_lora")
        return name

    def route_version(self, name: str, version: int) -> int:
        return hash((version, self._loaded[name].serial)) if name in self._loaded else version

    # --- calls from the client --------------------------------------------------------------------

    async def load(self, name: Any, adapter: Any, config: Any, timeout: float) -> LoraInfo:
        self._check_name(name)
        request = UpdateRequest(specs=[], timeout=timeout)
        request.check_values()
        most = self._info.max_loaded_loras
        async with turn(self._lock, Deadline(request.timeout, request.begun)):
            if name in self._loaded:
                raise UsageError(
                    f"an adapter {name!r} is loaded; use update_weights(..., lora={name!r}) to "
                    "replace it, or unload_lora"
                )
            if most and len(self._loaded) >= most:
                raise UsageError(f"{most} adapters are loaded, the most allowed (max_loaded_loras)")
            await self._bring(name, adapter, config, None, request)
        return self._loaded[name].info

    async def replace(
        self, name: Any, adapter: Any, config: Any, request: UpdateRequest
    ) -> UpdateReport:
        self.check(name)
        if request.inflight not in _INFLIGHT:
            raise UsageError(
                f"inflight must be one of {', '.join(_INFLIGHT)} for an adapter, got "
                f"{request.inflight!r}"
            )
        deadline = Deadline(request.timeout, request.begun)
        async with turn(self._lock, deadline, wait=request.wait):
            self.check(name)
            return await self._bring(name, adapter, config, self._loaded[name], request)

    async def unload(self, name: Any, timeout: float) -> None:
        self.check(name)
        check_timeout(timeout)
        deadline = Deadline(timeout)
        async with turn(self._lock, deadline):
            self.check(name)
            del self._loaded[name]
            await self._on_all(self._keep(), deadline)

    def _check_name(self, name: Any) -> None:
        if not self._info.max_lora_rank:
            raise UsageError(
                "the engine takes no adapters; launch it with enable_lora=True, max_lora_rank= and "
                "lora_target_modules="
            )
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
            raise UsageError(
                f"the name of an adapter is text of 1 to {_LONGEST_NAME} characters, got {name!r}"
            )

    # --- load and replace -------------------------------------------------------------------------

    async def _bring(
        self, name: str, adapter: Any, config: Any, old: _Loaded | None, request: UpdateRequest
    ) -> UpdateReport:
        """Send an adapter to all workers, and make it live. The caller holds the lock.

        Raises:
            InvalidAdapter: the adapter does not fit the engine. No worker has it.
            DeadlineExceeded: a worker did not prepare the adapter in time. No worker has it.
            WorkerLost: no worker is left.
        """
        from ..weights.adapter_source import load_payload, read_adapter

        deadline = Deadline(request.timeout, request.begun)
        version = request.check(self.versions.get(name, -1))
        given = read_adapter(adapter, config)
        new = given.config
        if new is None:
            if old is None:
                raise UsageError(
                    "config= is missing: PEFT's LoraConfig, or a mapping of its fields"
                )
            new = AdapterConfig(old.info.rank, old.info.scaling)
        model = await self._model(deadline)
        if given.base is not None and model is not None:
            await self._base_check.check(given.base, model, deadline)
        payload = await in_thread(load_payload, given, new, self._info, model, request.check_finite)
        self._serial += 1
        serial = self._serial
        calls = [
            _Order("lora_part", Raw(encode(LoraPart(serial, tensors))), [data])
            for tensors, data in payload.parts
        ]
        calls.append(_Order("lora_prepare", Raw(encode(LoraPrepare(serial, *new)))))
        prepare_at = time.perf_counter()
        try:
            await self._prepare_everywhere(calls, deadline)
        except BaseException:
            self._give_up()
            raise
        commit_at = time.perf_counter()
        # There is no await between here and the submission of the commits. A worker that starts to
        # serve therefore receives either this version with the other adapters, or the commit.
        info = LoraInfo(
            name=name,
            version=version,
            rank=new.rank,
            scaling=new.scaling,
            target_modules=payload.modules,
            bytes=payload.size,
        )
        commit = LoraCommit(serial, name, version, request.inflight)
        calls.append(_Order("lora_commit", Raw(encode(commit))))
        self._loaded[name] = _Loaded(info, serial, calls)
        self.versions[name] = version
        try:
            pauses = await self._on_all(calls[-1], deadline)
        finally:
            for listener in list(self._pool.weights.on_version):
                listener()
        ended = time.perf_counter()
        report = UpdateReport(
            version=version,
            bytes=payload.size,
            workers=[*pauses],
            mode="lora",
            join_ms=0.0,
            gather_ms=(prepare_at - request.begun) * 1e3,
            prepare_ms=(commit_at - prepare_at) * 1e3,
            broadcast_ms=0.0,
            stage_ms=0.0,
            commit_ms=(ended - commit_at) * 1e3,
            total_ms=(ended - request.begun) * 1e3,
            pause_ms=[*pauses.values()],
            lora=name,
            ended=time.time(),
        )
        self._pool.weights.versions.reports.append(report)
        return report

    async def _model(self, deadline: Deadline) -> ModelDescription | None:
        """Return the tensors of the model, or None if they are not known."""
        if not self._info.sglang_version:
            return None
        try:
            return await self._pool.weights.describe(deadline.left)
        except EngineError:
            # The engine cannot describe a quantized model. The workers check the shapes too.
            return None

    async def _prepare_everywhere(self, calls: list[_Order], deadline: Deadline) -> None:
        self._prepared = set()
        while missing := [w for w in self._driver.ready if w not in self._prepared]:
            # From here on, ``on_lost`` removes lost workers from the set.
            self._prepared.update(missing)
            made = [self._call(call, worker, deadline.left) for worker in missing for call in calls]
            for answer in await self._submit(made):
                if isinstance(answer, BaseException) and not isinstance(answer, WorkerLost):
                    raise answer
        if not self._driver.ready:
            raise WorkerLost("no worker is left that could load the adapter")

    def _give_up(self) -> None:
        """Make all workers discard the adapter that was not committed."""
        for worker in self._driver.ready:
            self._tell([self._keep()], worker)

    def _keep(self) -> _Order:
        keep = LoraKeep([one.serial for one in self._loaded.values()])
        return _Order("lora_keep", Raw(encode(keep)))

    # --- calls to workers -------------------------------------------------------------------------

    def _call(self, order: _Order, worker: int, seconds: float | None) -> Call:
        future = self._driver.loop.create_future()
        return urgent_call(
            _SPECS[order.name], order.args, worker, future, seconds, frames=order.frames
        )

    async def _submit(self, calls: list[Call]) -> list[Any]:
        futures = [call.reply.future for call in calls]
        return await self._driver.submit_all(calls, futures, return_exceptions=True)

    async def _on_all(self, order: _Order, deadline: Deadline) -> dict[int, Any]:
        """Call an endpoint of all workers that serve. Kill a worker that fails or is late.

        Returns:
            The answers by worker index.
        """
        left = max(_COMMIT_SECONDS, deadline.left)
        calls = [self._call(order, worker, left) for worker in self._driver.ready]
        answers = {}
        for call, answer in zip(calls, await self._submit(calls), strict=True):
            assert call.pinned is not None
            if not isinstance(answer, BaseException):
                answers[call.pinned] = answer
            elif not isinstance(answer, (WorkerLost, Closed)):
                self._expel(call.pinned, f"its adapters could not be changed: {answer}")
        return answers

    def _tell(self, orders: Iterable[_Order], worker: int) -> None:
        """Call endpoints of a worker without waiting. Kill the worker if it fails."""
        with contextlib.suppress(Closed, WorkerLost):
            for order in orders:
                call = self._call(order, worker, None)
                call.reply.future.add_done_callback(partial(self._told, worker))
                self._driver.submit(call)

    def _told(self, worker: int, answer: asyncio.Future[Any]) -> None:
        error = None if answer.cancelled() else answer.exception()
        if error is not None and not isinstance(error, (WorkerLost, Closed)):
            logger.warning("worker %d: %s", worker, error)
            self._expel(worker, f"it could not load the adapters: {error}")

    # --- events of the driver ---------------------------------------------------------------------

    def before_serving(self, worker: int) -> None:
        if self.versions:
            # A worker whose connection was lost may still have adapters that were unloaded or
            # replaced meanwhile.
            self._tell([self._keep()], worker)
            for one in self._loaded.values():
                self._tell(one.calls, worker)

    def on_lost(self, worker: int) -> None:
        self._prepared.discard(worker)

    def on_away(self, worker: int) -> None:
        self._prepared.discard(worker)
