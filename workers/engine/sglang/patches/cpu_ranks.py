"""Let several ranks of an engine run on a CPU. They communicate over gloo."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import sglang.srt.distributed.parallel_state as parallel_state
import sglang.srt.layers.moe.fused_moe_native as native
import sglang.srt.layers.moe.token_dispatcher.standard as standard
import torch

from ..patch import Setup


def install(setup: Setup) -> None:
    """Patch SGLang's groups of ranks, and let all ranks share the cores of the process."""
    # SGLang makes an NCCL communicator beside gloo in each group, which needs a GPU.
    parallel_state.init_model_parallel_group = functools.partial(
        parallel_state.init_model_parallel_group, use_pynccl=False
    )
    # By default SGLang requires a NUMA node for each rank, for kernels that bind their threads to
    # cores. Its published wheels do not contain these kernels.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    ranks = setup.server_args.tp_size
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * ranks))
    if setup.server_args.ep_size > 1:
        # SGLang's own function raises an error without an accelerator.
        standard.get_device = lambda: "cpu"
        native.moe_forward_native = functools.partial(_own_experts, native.moe_forward_native)


def _own_experts(
    forward: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk: Any, config: Any
) -> torch.Tensor:
    """Add up the outputs of a rank's own experts for each token. Return a tensor like ``x``.

    ``topk.topk_ids`` has the id -1 for experts of other ranks. ``forward`` is SGLang's
    implementation for a CPU, which does not accept this id.
    """
    tokens, choices = (topk.topk_ids >= 0).nonzero(as_tuple=True)
    total = torch.zeros_like(x, dtype=torch.float32)
    if len(tokens):
        own = topk._replace(
            topk_ids=topk.topk_ids[tokens, choices][:, None],
            topk_weights=topk.topk_weights[tokens, choices][:, None],
        )
        total.index_add_(0, tokens, forward(layer, x[tokens], own, config).float())
    return total.to(x.dtype)
