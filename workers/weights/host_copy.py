"""Keep a copy of parts of a GPU's or CPU's weight memory in other memory of the host."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from sglrl.errors import EngineError
from sglrl.transport.system_limits import available_memory

Ranges = Sequence[tuple[int, int]]
"""Byte ranges. Each has the index of its first byte and the index after its last byte."""

_PIECE_BYTES = 1 << 30
_LEFT_FREE = 0.05
"""Share of the available memory that stays free."""


class HostCopy:
    """Saves parts of a device's memory to the memory of the host, and loads them again.

    For a GPU the host memory is page-locked, so that the GPU copies at the speed of its bus.
    Locking takes 3 s for 16 GB on an H200, so the locked memory is kept for the next copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ranges: Ranges = ()
        self._room = 0
        self._pieces: list[torch.Tensor] = []

    def save(self, memory: torch.Tensor, ranges: Ranges) -> None:
        """Copy the given ranges of ``memory`` to the memory of the host.

        Args:
            memory: the memory of the device: uint8, shape (size,).

        Raises:
            EngineError: the host has too little memory.
        """
        size = sum(end - begin for begin, end in ranges)
        if size > self._room:
            self._allocate(size)
        self._ranges = ranges
        for kept, part in self._parts(memory):
            kept.copy_(part, non_blocking=True)
        self._synchronize()

    def load(self, memory: torch.Tensor) -> None:
        """Copy the saved parts back to their places in ``memory``."""
        for kept, part in self._parts(memory):
            part.copy_(kept, non_blocking=True)
        self._synchronize()

    def _parts(self, memory: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pair each part of the host memory with the part of ``memory`` that it stores."""
        pairs = []
        pieces = iter(self._pieces)
        piece = next(pieces, torch.empty(0, dtype=torch.uint8))
        for begin, end in self._ranges:
            while begin < end:
                if not len(piece):
                    piece = next(pieces)
                count = min(len(piece), end - begin)
                pairs.append((piece[:count], memory[begin : begin + count]))
                piece, begin = piece[count:], begin + count
        return pairs

    def _allocate(self, size: int) -> None:
        self._free()
        room = int(available_memory() * (1 - _LEFT_FREE))
        if size > room:
            raise EngineError(
                f"keeping these weights takes {size:,} bytes of the host's memory, and {room:,} "
                "are free; use keep_weights=False, and update the weights after waking"
            )
        sizes = [min(_PIECE_BYTES, size - begin) for begin in range(0, size, _PIECE_BYTES)]
        try:
            for size_of_one in sizes:
                piece = _new_memory(size_of_one)
                if self._device.type == "cuda":
                    code = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), len(piece), 0)
                    torch.cuda.check_error(int(code))
                self._pieces.append(piece)
        except BaseException:
            self._free()
            raise
        self._room = size

    def _free(self) -> None:
        if self._device.type == "cuda":
            for piece in self._pieces:
                torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
        self._pieces, self._room = [], 0

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _new_memory(size: int) -> torch.Tensor:
    """Return zeroed memory whose pages are already allocated: uint8, shape (size,)."""
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # With huge pages, there are fewer pages to lock.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size].zero_()
