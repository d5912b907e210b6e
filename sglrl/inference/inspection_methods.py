"""The methods of ``Client`` that look into the engines: arguments, weights, profiles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from ..config import check_target, path_of
from ..errors import UsageError, WorkerLost
from ..wire.engine import TensorValue
from .client_base import ClientBase
from .engine_controls import ENDPOINTS, ask_all

ACTIVITIES: Final = ("CPU", "GPU", "MEM")


class InspectionMethods(ClientBase):
    """The methods of ``Client`` that look into the engines."""

    _timeout: float | None

    async def server_info(self) -> list[dict[str, Any]]:
        """Return what every live engine was started with, in worker order.

        Each dict has the fields of SGLang's ``ServerArgs`` with their final values, the limits
        that SGLang computed, and ``version``, that of SGLang.
        """
        driver = self._running(urgent=True)
        found = await ask_all(driver, ENDPOINTS["server_info"], timeout=self._timeout)
        return list(found.values())

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
            folder: for the traces, on the host of each worker.
            activities: of "CPU", "GPU" (not recorded where there is none) and "MEM".
            with_stack: record the place in the code of each operation.
            record_shapes: record the shapes of the inputs of each operation.
            timeout: seconds that a worker may take.

        Raises:
            UsageError: an argument is wrong, or the engine has no profiler.
            InvalidRequest: the profiler is running, or a worker cannot write to the folder.
        """
        path = path_of("folder", folder)
        if not path:
            raise UsageError(f"folder must be a path, got {folder!r}")
        wrong = [name for name in activities if name not in ACTIVITIES]
        if isinstance(activities, str) or wrong or not activities:
            raise UsageError(f"activities must be of {', '.join(ACTIVITIES)}, got {activities!r}")
        driver = self._running(urgent=True)
        args = (os.path.join(os.getcwd(), path), tuple(activities), with_stack, record_shapes)
        await ask_all(driver, ENDPOINTS["start_profile"], args, timeout=timeout)

    async def stop_profile(self, *, timeout: float = 600.0) -> list[str]:
        """Stop the profiler in every worker and write the traces.

        Args:
            timeout: seconds that a worker may take. Traces of many steps are large.

        Returns:
            The paths of the traces on the hosts of the workers, which Perfetto and
            ``chrome://tracing`` show. Their names have the pids of the workers.

        Raises:
            InvalidRequest: the profiler is not running.
        """
        driver = self._running(urgent=True)
        found = await ask_all(driver, ENDPOINTS["stop_profile"], timeout=timeout)
        return [path for paths in found.values() for path in paths]

    async def get_weights(
        self, names: Sequence[str], *, worker: int | None = None, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Return copies of live weights, to look at them.

        Args:
            names: Hugging Face names, as in ``model_metadata``.
            worker: the worker whose weights are returned; None: the first one that serves.
            timeout: seconds that the answer may take.

        Returns:
            CPU tensors (``torch.Tensor``) by name, with the engine's dtype. The weights of all
            names are of one version.

        Raises:
            InvalidWeights: the model has no tensor of a name.
            InvalidRequest: a tensor is spread over several GPUs (tp_size > 1).
            MessageTooLarge: the tensors together are larger than ``max_message_bytes``.
        """
        if isinstance(names, str):
            raise UsageError(f"names must be a sequence of names, got {names!r}")
        check_target(0, worker, None)
        driver = self._running(urgent=True)
        if worker is None:
            if not driver.ready:
                raise WorkerLost("no worker serves")
            worker = min(driver.ready)
        spec = ENDPOINTS["get_weights"]
        found = await ask_all(driver, spec, (list(names),), timeout=timeout, worker=worker)
        return {value.name: _tensor(value) for value in found[worker]}


def _tensor(value: TensorValue) -> Any:
    try:
        import torch
    except ImportError:
        raise UsageError("get_weights returns tensors, and torch is not installed here") from None
    dtype = getattr(torch, value.dtype)
    if not value.data:
        return torch.empty(value.shape, dtype=dtype)
    return torch.frombuffer(value.data, dtype=dtype).reshape(value.shape)
