"""What SGLang's published wheels need to run a model on a CPU-only machine."""

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
"""A worker that starts gets three times the time of one that serves."""

_LARGE = 1 << 20
_ALIGNMENT = 64
"""Bytes. PyTorch's own tensors have it."""


def engine_arguments(memory_share: float) -> dict[str, Any]:
    """Defaults for ``device="cpu"``; what the user passes wins."""
    return {
        # SGLang would take most of the host's memory for the KV cache, once per replica.
        "mem_fraction_static": 0.6 * memory_share,
        "max_total_tokens": 1 << 17,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
    }


def prepare(threads: int) -> None:
    """Call in the worker before the model is built."""
    # The wheel takes itself for a CPU build only when told so at build time; its rotary layer
    # otherwise asks for vllm's CUDA kernel.
    rotary._is_cpu = True
    # On a CPU it makes MLPs and experts a multiple of 32 wide, for kernels that the wheel has not;
    # and nobody clears what no weight is loaded into.
    update_config.DEFAULT_MOE_PADDING_SIZE = 1
    # Ten times while a worker starts it runs lscpu and waits for it, for what never changes.
    common.parse_lscpu_topology = cache(common.parse_lscpu_topology)
    torch.set_num_threads(threads)
    # Its xgrammar backend asks for pinned memory, which needs a CUDA driver, and masks logits with
    # a Triton kernel; xgrammar itself has a CPU kernel for the same bitmask.
    xgrammar_backend._allocate_token_bitmask = _allocate_token_bitmask
    xgrammar_backend.XGrammarGrammar.apply_vocab_mask = _apply_vocab_mask
    # These are Triton kernels too.
    logits_processor.fused_softcap = _cap
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated


def check(model: torch.nn.Module) -> None:
    """Raise ``EngineError`` for a model of which a CPU would compute something else."""
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
    """Large tensors of zeros on the CPU are memory that the kernel has yet to give: PyTorch writes
    the zeros, so a KV cache for many tokens would take all its memory, and the time to fill it,
    when the worker starts."""

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
    """From now on whatever else wants a core goes first: the driver, a trainer, a worker that
    starts in place of a lost one. Call when the first request runs."""
    # A thread has a niceness of its own, which those that it starts inherit.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread), _NICENESS)
    # It counts within a session only, where the kernel groups tasks by session (sched(7)), and a
    # worker is one of its own.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
