"""Compute checksums of tensors. A sender and an engine get the same value on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1 << 24
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def checksum(tensor: torch.Tensor) -> int:
    """Return the checksum of the bits of all values in row-major order.

    The checksum is ``sum((bits + 1) * (position * odd | 1))`` modulo 2^64, so a changed, moved or
    swapped value changes it. The computation works on blocks to limit its memory.
    """
    flat = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        bits = flat[start : start + _BLOCK].to(torch.int64)
        position = torch.arange(start, start + bits.numel(), device=flat.device)
        total += ((bits + 1) * ((position * _ODD) | 1)).sum()
    return int(total)


def piece(
    tensor: torch.Tensor, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a part of a tensor, as ``torch.as_strided`` does for the contiguous tensor.

    ``offset``, ``size`` and ``stride`` count elements.
    """
    tensor = tensor.contiguous()
    # The tensor may be a view that starts at an offset of its storage.
    return tensor.as_strided(tuple(size), tuple(stride), tensor.storage_offset() + offset)
