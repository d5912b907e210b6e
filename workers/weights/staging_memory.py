"""Allocate the memory of an update on one rank: its size, and how it is divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglrl.core.manifest import Layout
from sglrl.errors import InvalidWeights
from sglrl.transport.system_limits import available_memory

from .double_buffer import SPARE_BYTES

RING_BYTES = 6 << 30
"""Bytes of the ring of a bucketed update, which has no memory for a second copy of all weights.

The ring holds the buckets that arrive before the engine is held. If little memory is free, the
ring is smaller, but it has at least ``MIN_RING`` slots.
"""
MIN_RING = 2


class StagingMemory:
    """Allocates the memory of updates on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._had = 0
        """The size of the last update's staging memory, which torch still caches."""

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def allocate_all(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Allocate all memory of an update, and record its size."""
        memory = self.allocate(sizes)
        self._had = sum(sizes)
        return memory

    def room(self, wanted: int) -> int:
        """Return the bytes that staging may use, or a smaller number of at least ``wanted``."""
        if self._device.type == "cpu":
            return available_memory()
        # memory_reserved() and similar functions build a dict of all statistics, which takes a
        # millisecond.
        stats = torch._C._cuda_memoryStats(self._device.index)
        cached: int = (
            stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
        )
        if cached >= wanted and wanted <= self._had:
            # The memory of the last update suffices. A call of the driver can take a millisecond.
            return cached
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return max(0, free + cached - SPARE_BYTES)


def ring_sizes(layout: Layout, room: int) -> list[int]:
    """Return the sizes of the slots of a bucketed update.

    If some buckets are larger than a slot, the last slot has the size of the largest bucket.
    """
    slot = layout.ring_slot
    large = max((size for size in layout.sizes if size > slot), default=0)
    wanted = -(-RING_BYTES // slot)
    ring = max(MIN_RING, min(wanted, len(layout.sizes), (room - large) // slot))
    return [slot] * ring + ([large] if large else [])


def choose(wanted: str, layout: Layout, room: int, *, must_fit: bool) -> tuple[str, list[int]]:
    """Choose the mode of an update.

    Args:
        wanted: the mode that was requested: "auto", "full" or "bucketed".
        must_fit: whether the smallest ring must fit into ``room``.

    Returns:
        The mode, and the sizes of the memory: one for each bucket, or for each slot of the ring.

    Raises:
        InvalidWeights: there is no room for the mode that was requested.
    """
    if not layout.sizes or (wanted in ("auto", "full") and layout.total <= room):
        return "full", layout.sizes
    ring = ring_sizes(layout, room)
    if wanted != "full" and (sum(ring) <= room or not must_fit):
        return "bucketed", ring
    least = layout.total if wanted == "full" else sum(ring)
    raise InvalidWeights(
        f"no room to stage the weights: {least / 1e9:.2f} GB are needed and "
        f"{room / 1e9:.2f} GB are free; lower mem_fraction_static, or bucket_bytes"
    )
