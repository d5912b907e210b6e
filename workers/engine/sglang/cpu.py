"""Changes to SGLang's published wheels that let them run a model on a CPU-only machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sglang.srt.configs.update_config as update_config
import sglang.srt.constrained.xgrammar_backend as xgrammar_backend
import sglang.srt.layers.logits_processor as logits_processor
import sglang.srt.layers.rotary_embedding.base as rotary
import sglang.srt.models.qwen2_moe as qwen2_moe
import sglang.srt.utils.common as common
import torch
import xgrammar
from torch.overrides import TorchFunctionMode

from sglrl.errors import EngineError

_NICENESS = 5
"""With this niceness, a serving worker gets a third of the CPU time of a starting one."""

_LARGE = 1 << 20
"""``UntouchedZeros`` handles tensors of at least this many bytes."""
_ALIGNMENT = 64
"""Alignment in bytes, the same as for PyTorch's own tensors."""


def engine_arguments(memory_share: float) -> dict[str, Any]:
    """Return defaults for ``device="cpu"``. The user's arguments override them."""
    return {
        # Each replica's KV cache would otherwise take most of the host's memory.
        "mem_fraction_static": 0.6 * memory_share,
        "max_total_tokens": 1 << 17,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
    }


def prepare(threads: int) -> None:
    """Patch SGLang for a CPU. The worker calls this before it builds the model.

    Args:
        threads: the number of torch's threads.
    """
    # The wheel is a CPU build only if a build option says so. Otherwise its rotary layer imports
    # vllm's CUDA kernel.
    rotary._is_cpu = True
    # On a CPU SGLang pads MLPs and experts to a multiple of 32, for kernels that the wheel does not
    # contain. No weight is loaded into the padding, and SGLang does not set it to zero.
    update_config.DEFAULT_MOE_PADDING_SIZE = 1
    # While a worker starts, SGLang runs lscpu ten times and waits for it. The result never changes.
    common.parse_lscpu_topology = cache(common.parse_lscpu_topology)
    torch.set_num_threads(threads)
    # SGLang's xgrammar backend allocates pinned memory, which needs a CUDA driver, and masks logits
    # with a Triton kernel. xgrammar itself has a CPU kernel for the same bitmask.
    xgrammar_backend._allocate_token_bitmask = _allocate_token_bitmask
    xgrammar_backend.XGrammarGrammar.apply_vocab_mask = _apply_vocab_mask
    # These functions are Triton kernels, too.
    logits_processor.fused_softcap = _cap
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated


def check(model: torch.nn.Module) -> None:
    """Raise ``EngineError`` for a model with different results on a CPU than on a GPU."""
    if any(getattr(part, "logit_cap", 0) > 0 for part in model.modules()):
        raise EngineError(
            f"{type(model).__name__} caps the logits of its attention, which SGLang does on GPUs "
            "only; use device='cuda'"
        )


def _cap(logits: torch.Tensor, cap: float) -> None:
    logits.div_(cap).tanh_().mul_(cap)


def _add_gated(
    states: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    out += torch.sigmoid(states @ gate)[:, None] * shared


class UntouchedZeros(TorchFunctionMode):  # type: ignore[misc]
    """Makes large CPU tensors of zeros from pages that the kernel allocates on first use.

    PyTorch writes the zeros itself. A KV cache for many tokens would then take all of its memory,
    and the time to fill it, when the worker starts.
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


def give_way() -> None:
    """Lower the priority of this worker, so that other processes get a core first.

    Examples are the driver, a trainer and a worker that replaces a lost one. Call this when the
    first request runs.
    """
    # Every thread has its own niceness. New threads inherit it from the thread that starts them.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)
    # If the kernel groups tasks by session (sched(7)), niceness counts only within a session. Each
    # worker has its own session, so set the niceness of the session's group, too.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
