"""Inspect the engines of a pool: statistics, arguments, prefix caches, profiles and weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from ..actors.actor import EndpointSpec, endpoint, endpoints_of
from ..config import check_target, path_of
from ..errors import UnknownEndpoint, UsageError, WorkerLost
from ..wire.engine import EngineStats, TensorValue
from .client_base import ClientBase
from .engine_calls import ask_all
from .operations import operation

ACTIVITIES: Final = ("CPU", "GPU", "MEM")


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The ``EngineStats`` of one worker, with the index of the worker."""

    worker: int
    engine: EngineStats


class EngineEndpoints(Protocol):
    """The unary control endpoints of an engine worker, which the worker's mailbox serves."""

    @endpoint(idempotent=True)
    async def stats(self) -> EngineStats: ...

    @endpoint(idempotent=True)
    async def flush_cache(self) -> bool: ...

    @endpoint(idempotent=True)
    async def server_info(self) -> dict[str, Any]: ...

    @endpoint
    async def start_profile(
        self, folder: str, activities: tuple[str, ...], with_stack: bool, record_shapes: bool
    ) -> list[str]: ...

    @endpoint
    async def stop_profile(self) -> list[str]: ...

    @endpoint(idempotent=True)
    async def get_weights(self, names: list[str]) -> list[TensorValue]: ...


_ENDPOINTS: Final = endpoints_of(EngineEndpoints)


class EngineMethods(ClientBase):
    """The methods of ``Client`` that inspect the engines."""

    @operation(urgent=True)
    async def stats(self) -> list[WorkerStats]:
        """Return the statistics of every live engine, in worker order."""
        stats = await self._ask_all("stats")
        return [WorkerStats(worker=w, engine=s) for w, s in stats.items()]

    @operation(urgent=True)
    async def flush_cache(self) -> bool:
        """Empty every worker's prefix cache.

        Returns:
            False if a worker kept its cache because it had requests.
        """
        return all((await self._ask_all("flush_cache")).values())

    async def broadcast(
        self, endpoint: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a control endpoint of the engines (``stats``, ``flush_cache``, ...) on every worker.

        Only workers that serve are called.

        Returns:
            The results in worker order.

        Raises:
            UnknownEndpoint: no endpoint has this name.
        """
        type_ = _declared(endpoint).result.type
        answers = await self._call_engines(endpoint, [*args], kwargs, timeout=timeout)
        return [msgspec.convert(value, type_) for value in answers]

    @operation(urgent=True)
    async def _call_engines(
        self,
        endpoint: str,
        args: list[Any],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        spec = _declared(endpoint)
        answers = await ask_all(self._running(urgent=True), spec, tuple(args), kwargs, timeout)
        return [*answers.values()]

    async def _ask_all(
        self, endpoint: str, *args: Any, timeout: float | None = None
    ) -> dict[int, Any]:
        driver = self._running(urgent=True)
        timeout = self.timeout if timeout is None else timeout
        return await ask_all(driver, _ENDPOINTS[endpoint], args, timeout=timeout)

    @operation(urgent=True)
    async def server_info(self) -> list[dict[str, Any]]:
        """Return the arguments and limits of every live engine, in worker order.

        Each dict has the fields of SGLang's ``ServerArgs`` with their final values, the limits
        that SGLang computed, and ``version``, the version of SGLang.
        """
        return [*(await self._ask_all("server_info")).values()]

    @operation(urgent=True)
    async def start_profile(
        self,
        folder: str | os.PathLike[str],
        *,
        activities: Sequence[str] = ("CPU", "GPU"),
        with_stack: bool = False,
        record_shapes: bool = False,
        timeout: float = 60.0,
    ) -> None:
        """Start torch's profiler in every worker. It slows the engines down until ``stop_profile``.

        Args:
            folder: the folder for the traces, on the host of each worker.
            activities: what to record: any of "CPU", "GPU" and "MEM". "GPU" has no effect on a
                worker without a GPU.
            with_stack: record for each operation the place in the code.
            record_shapes: record for each operation the shapes of its inputs.
            timeout: seconds that a worker may take to start the profiler.

        Raises:
            UsageError: an argument is wrong, or the engine has no profiler.
            InvalidRequest: the profiler already runs, or a worker cannot write to the folder.
        """
        path = path_of("folder", folder)
        if not path:
            raise UsageError(f"folder must be a path, got {folder!r}")
        wrong = [name for name in activities if name not in ACTIVITIES]
        if isinstance(activities, str) or wrong or not activities:
            raise UsageError(f"activities must be of {', '.join(ACTIVITIES)}, got {activities!r}")
        args = os.path.join(os.getcwd(), path), tuple(activities), with_stack, record_shapes
        await self._ask_all("start_profile", *args, timeout=timeout)

    @operation(urgent=True)
    async def stop_profile(self, *, timeout: float = 600.0) -> list[str]:
        """Stop the profiler in every worker and write the traces.

        Args:
            timeout: seconds that a worker may take. Traces of many steps are large.

        Returns:
            The paths of the traces on the hosts of the workers. Each file name contains the pid of
            its worker. Perfetto and ``chrome://tracing`` show the traces.

        Raises:
            InvalidRequest: the profiler is not running.
        """
        answers = await self._ask_all("stop_profile", timeout=timeout)
        return [path for paths in answers.values() for path in paths]

    async def get_weights(
        self, names: Sequence[str], *, worker: int | None = None, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Return copies of live weights, for inspection.

        Args:
            names: the tensors' Hugging Face names, as in ``model_metadata``.
            worker: the id of the worker whose weights are returned. None: the worker with the
                lowest id among those that serve.
            timeout: seconds that the answer may take.

        Returns:
            CPU tensors (``torch.Tensor``) by name, with the engine's dtype. All tensors have the
            same weights version.

        Raises:
            InvalidWeights: the model has no tensor with one of the names.
            InvalidRequest: a tensor is spread over several GPUs (tp_size > 1).
            MessageTooLarge: the tensors together are larger than ``max_message_bytes``.
        """
        if isinstance(names, str):
            raise UsageError(f"names must be a sequence of names, got {names!r}")
        check_target(0, worker, None)
        values = await self._weight_values(list(names), worker, timeout=timeout)
        return {value.name: _tensor(value) for value in values}

    @operation(urgent=True)
    async def _weight_values(
        self, names: list[str], worker: int | None, *, timeout: float
    ) -> list[TensorValue]:
        driver = self._running(urgent=True)
        if worker is None:
            if not driver.ready:
                raise WorkerLost("no worker serves")
            worker = min(driver.ready)
        spec = _ENDPOINTS["get_weights"]
        answers = await ask_all(driver, spec, (names,), timeout=timeout, worker=worker)
        values: list[TensorValue] = answers[worker]
        return values


def _declared(endpoint: str) -> EndpointSpec:
    spec = _ENDPOINTS.get(endpoint)
    if spec is None:
        raise UnknownEndpoint(
            f"the engines declare no endpoint {endpoint!r} to be called on all of them "
            f"(endpoints: {', '.join(sorted(_ENDPOINTS))})"
        )
    return spec


def _tensor(value: TensorValue) -> Any:
    try:
        import torch
    except ImportError:
        raise UsageError("get_weights returns tensors, and torch is not installed here") from None
    dtype = getattr(torch, value.dtype)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(value.data, dtype=dtype).reshape(value.shape)
