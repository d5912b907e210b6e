"""Let SGLang's LoRA adapters run on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.lora.lora_manager import LoRAManager
from torch.overrides import TorchFunctionMode

from ..patch import Setup


def install(setup: Setup) -> None:
    """Patch SGLang's classes for a CPU."""
    # These methods allocate pinned memory, which needs a CUDA driver.
    for owner, name in (
        (LoRAManager, "init_state"),
        (TorchNativeLoRABackend, "prepare_lora_batch"),
    ):
        setattr(owner, name, _unpinned(getattr(owner, name)))


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Unpinned():
            return function(*args, **kwargs)

    return run


class _Unpinned(TorchFunctionMode):  # type: ignore[misc]
    """Allocates ordinary memory in place of pinned memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)
