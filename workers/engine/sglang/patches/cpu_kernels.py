"""Let SGLang's published wheels run a model on a machine without a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import sglang.srt.configs.update_config as update_config
import sglang.srt.constrained.xgrammar_backend as xgrammar_backend
import sglang.srt.layers.logits_processor as logits_processor
import sglang.srt.layers.rotary_embedding.base as rotary
import sglang.srt.models.qwen2_moe as qwen2_moe
import sglang.srt.utils.common as common
import torch
import xgrammar

from ..patch import Setup


def install(setup: Setup) -> None:
    """Patch SGLang's functions for a CPU."""
    # A build option decides whether SGLang considers the wheel a CPU build. In other builds, the
    # rotary layer imports vllm's CUDA kernel.
    rotary._is_cpu = True
    # On a CPU SGLang pads MLPs and experts to a multiple of 32, for kernels that the wheel does not
    # contain. No weight is loaded into the padding, and SGLang does not set it to zero.
    update_config.DEFAULT_MOE_PADDING_SIZE = 1
    # A starting worker runs lscpu ten times and waits each time. The result never changes.
    common.parse_lscpu_topology = cache(common.parse_lscpu_topology)
    # SGLang's xgrammar backend allocates pinned memory, which needs a CUDA driver, and masks logits
    # with a Triton kernel. The xgrammar package has a CPU kernel for the same bitmask.
    xgrammar_backend._allocate_token_bitmask = _allocate_token_bitmask
    xgrammar_backend.XGrammarGrammar.apply_vocab_mask = _apply_vocab_mask
    # SGLang implements these two functions as Triton kernels as well.
    logits_processor.fused_softcap = _cap
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated


def _cap(logits: torch.Tensor, cap: float) -> None:
    logits.div_(cap).tanh_().mul_(cap)


def _add_gated(
    states: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:
    out += torch.sigmoid(states @ gate)[:, None] * shared


def _allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _apply_vocab_mask(self: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")
