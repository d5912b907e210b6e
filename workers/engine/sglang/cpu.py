"""What SGLang's published wheels need to run a model on a CPU-only machine."""

from __future__ import annotations

from typing import Any

import torch


def engine_arguments() -> dict[str, Any]:
    """Defaults for ``device="cpu"``; what the user passes wins."""
    return {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
    }


def prepare(threads: int) -> None:
    """Call in the worker before the model is built."""
    import sglang.srt.layers.rotary_embedding.base as rotary

    # The wheel takes itself for a CPU build only when told so at build time; its rotary layer
    # otherwise asks for vllm's CUDA kernel.
    rotary._is_cpu = True
    torch.set_num_threads(threads)
