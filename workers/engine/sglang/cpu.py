"""Support for models on a CPU: SGLang's arguments, memory, process priority, and a model check."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from sglrl.errors import EngineError

_NICENESS = 5
"""The niceness of a serving worker, which thus gets a third of a starting worker's CPU time."""

_LARGE = 1 << 20
"""Minimum size in bytes of the tensors that ``UntouchedZeros`` handles."""
_ALIGNMENT = 64
"""Alignment in bytes, which equals the alignment of PyTorch's own tensors."""


def engine_arguments(memory_share: float) -> dict[str, Any]:
    """Return defaults for ``device="cpu"``. The user's arguments override them."""
    return {
        # With SGLang's default, the KV cache of each replica takes most of the host's memory.
        "mem_fraction_static": 0.6 * memory_share,
        "max_total_tokens": 1 << 17,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "lora_backend": "torch_native",
    }


def check(model: torch.nn.Module) -> None:
    """Raise ``EngineError`` for a model whose results differ between a CPU and a GPU."""
    if any(getattr(part, "logit_cap", 0) > 0 for part in model.modules()):
        raise EngineError(
            f"{type(model).__name__} caps the logits of its attention, which SGLang does on GPUs "
            "only; use device='cuda'"
        )


class UntouchedZeros(TorchFunctionMode):  # type: ignore[misc]
    """Makes large CPU tensors of zeros from pages that the kernel allocates on first use.

    PyTorch itself writes the zeros. The start of a worker would then wait until the KV cache is
    filled, and all pages of the cache would take memory.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and str(kwargs.get("device")) == "cpu" and not kwargs.get("out"):
            like = torch.empty(*args, **kwargs | {"device": "meta"})
            size = like.numel() * like.element_size()
            if size >= _LARGE:
                memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
                begin = -memory.ctypes.data % _ALIGNMENT
                flat = torch.from_numpy(memory[begin : begin + size])
                return flat.view(like.dtype).view(like.shape)
        return func(*args, **kwargs)


def discard(tensors: Sequence[torch.Tensor]) -> None:
    """Return the memory of tensors to the kernel. The tensors then contain zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in tensors:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        whole = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if whole > 0 and libc.madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "the kernel did not take memory back")


def give_way() -> None:
    """Lower the priority of this worker, so that other processes get a core first.

    The other processes are the driver, a trainer, and a worker that replaces a lost worker. Call
    this when the first request runs.
    """
    # Every thread has its own niceness. New threads inherit it from the thread that starts them.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)
    # If the kernel groups tasks by session (sched(7)), niceness counts only within a session. Each
    # worker is a session of its own, so set the niceness of the session's group, too.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="utf-8")
