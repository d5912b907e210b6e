"""Layers on a CPU in fewer calls of PyTorch: with a small model a step is mostly the time that its
calls take, whatever is computed.

In float32 only: what SGLang's rounds between two calls would come out otherwise.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding


class Step:
    """What the layers of one step have in common: kept from ``begin`` on, which must then be called
    before every step."""

    def __init__(self) -> None:
        self._known: dict[RotaryEmbedding, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._keeps = False

    def begin(self) -> None:
        self._known.clear()
        self._keeps = True

    def angles(
        self, rotary: RotaryEmbedding, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines, and sines with the sign that either half has them with; float32, [tokens, 1,
        head size]."""
        known = self._known.get(rotary)
        if known is not None and known[0] is positions:
            return known[1:]
        cos, sin = rotary.cos_sin_cache.index_select(0, positions.flatten()).chunk(2, dim=-1)
        cos, sin = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
        if self._keeps:
            self._known[rotary] = positions, cos, sin
        return cos, sin


step = Step()
_norm = RMSNorm.forward_native
_rotate = RotaryEmbedding.forward_native


def normalize(
    self: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
) -> Any:
    """In the place of ``RMSNorm.forward_native``."""
    plain = (
        x.dtype == self.weight.dtype == torch.float32
        and self.variance_size_override is None
        and post_residual_addition is None
        and (residual is None or residual.dtype == torch.float32)
    )
    if not plain:
        return _norm(self, x, residual, post_residual_addition)
    if residual is None:
        return _normalized(self, x)
    x = x + residual
    return _normalized(self, x), x


def _normalized(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    # PyTorch's rms_norm is ten calls on a CPU.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean = torch.addcmul(
        _epsilon(norm.variance_epsilon), length, length, value=1 / norm.hidden_size
    )
    return x * mean.rsqrt_() * norm.weight


@cache
def _epsilon(value: float) -> torch.Tensor:
    return torch.tensor(value)


def rotate(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> Any:
    """In the place of ``RotaryEmbedding.forward_native``: all heads of queries and keys at once, by
    halves that trade places (https://arxiv.org/abs/2104.09864, eq. 34, in GPT-NeoX's order)."""
    size = self.head_size
    plain = (
        query.dtype == key.dtype == self.cos_sin_cache.dtype == torch.float32
        and self.is_neox_style
        and self.rotary_dim == size
        and query.dim() == key.dim() == 2
        and offsets is None
        and fused_set_kv_buffer_arg is None
        and not hasattr(self, "sin_cos_cache")
    )
    if not plain:
        return _rotate(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
    both = torch.cat((query, key), dim=-1).unflatten(-1, (-1, size))
    cos, sin = step.angles(self, positions)
    turned = torch.addcmul(both * cos, both.roll(size // 2, -1), sin).flatten(1)
    return turned.split((query.shape[1], key.shape[1]), dim=-1)


def install() -> None:
    """Call in the worker before the model is built."""
    # SGLang copies what goes into a step to where its CUDA graphs would read it.
    os.environ["SGLANG_EAGER_INPUT_NO_COPY"] = "1"
    RMSNorm.forward_native = normalize
    RotaryEmbedding.forward_native = rotate
