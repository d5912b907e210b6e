"""Attention on a CPU for all requests of a step at once.

On CPUs without AMX, SGLang's backend handles one request after the other, in Python, in every
layer. With a small model this takes most of a step. Prefills are slower still, because the backend
also computes the tokens in the prefix cache, and then drops the results. In this module, one call
of PyTorch's attention handles all requests of about the same length (``ragged_attention.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from ..patch import Setup
from .ragged_attention import Call, attend, plan, token_bytes


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Replaces SGLang's "torch_native" backend, except for encoders and sliding window pools."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._calls: dict[int | None, list[Call]] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        # All layers of a step share these calls.
        self._calls = {}

    def _run_sdpa_forward_decode(self, *args: Any, **options: Any) -> torch.Tensor:
        query, output, keys, values, table, rows, lengths, encoded = args
        if encoded is not None or self.use_sliding_window_kv_pool:
            return super()._run_sdpa_forward_decode(*args, **options)
        window = options["sliding_window_size"]
        if window not in self._calls:
            counts = torch.ones_like(lengths)
            self._calls[window] = plan(
                table, rows, lengths - 1, counts, window, token_bytes(keys, values)
            )
        attend(self._calls[window], query, output, keys, values, options["scaling"])
        return output

    def _run_sdpa_forward_extend(self, *args: Any, **options: Any) -> torch.Tensor:
        query, output, keys, values, table, rows, _, begins, counts, encoded = args
        if encoded is not None or self.use_sliding_window_kv_pool or not options["causal"]:
            return super()._run_sdpa_forward_extend(*args, **options)
        window = options["sliding_window_size"]
        if window not in self._calls:
            self._calls[window] = plan(
                table, rows, begins, counts, window, token_bytes(keys, values)
            )
        attend(self._calls[window], query, output, keys, values, options["scaling"])
        return output


def install(setup: Setup) -> None:
    """Register the backend under SGLang's name "torch_native"."""
    ATTENTION_BACKENDS["torch_native"] = BatchedAttention
