"""Memory of which there are two, and addresses behind which either of them can be.

New weights come into the spare memory while the live one is read. Then the two change places: the
addresses stay, which CUDA graphs and everything else that has been told of them need, and no byte
is copied. On an H200 that takes a millisecond for 16 GB, and a copy takes eight.

On CUDA it is done with the driver's virtual memory management
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#virtual-memory-management), on a CPU with
two files in memory that ``mmap`` puts at the same place.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

SPARE_BYTES = 1 << 30
"""Of a GPU's free memory, which staging leaves to the engine."""
_LEFT_FREE = 4 << 30
"""Bytes. With less left for the engine the spare memory is given back after each update."""


class Pages(ABC):
    """``live``: uint8, (size,), the memory that is in use. ``fresh``: the spare one has never been
    live."""

    live: torch.Tensor

    def __init__(self) -> None:
        self.fresh = True
        self._lock = threading.Lock()
        self._readers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """For who reads ``live`` on another thread than the one that makes the spare memory live:
        as long as it takes, and several at a time."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def spare(self) -> torch.Tensor | None:
        """The other memory, (size,), made if there is none. None if there is no room for it."""
        with self._lock:
            return self._make_spare()

    def make_live(self) -> None:
        """What the spare memory holds is live when this returns, or as far as CUDA's current stream
        is concerned: then it was copied, because someone reads, who may take long. Neither memory
        may be in use in any other way, but for what a GPU was given to do before."""
        with self._lock:
            if not self._readers:
                self._exchange()
                self.fresh = False
                return
        spare = self.spare()
        assert spare is not None
        self.live.copy_(spare)

    def settle(self) -> None:
        """After ``make_live``, when there is time: what was live becomes the spare memory, or is
        given back where memory is short."""
        with self._lock:
            self._settle()

    @abstractmethod
    def _make_spare(self) -> torch.Tensor | None: ...

    @abstractmethod
    def _exchange(self) -> None: ...

    @abstractmethod
    def _settle(self) -> None: ...


class _FilePages(Pages):
    """On a CPU."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mmap = ctypes.CDLL(None, use_errno=True).mmap
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._files = [self._file()]
        self._places = [self._map(None, self._files[0])]
        self.live = self._tensor(self._places[0])
        self._spare: torch.Tensor | None = None

    def _file(self) -> int:
        file = os.memfd_create("sglrl-weights")
        os.ftruncate(file, self._size)
        return file

    def _map(self, place: int | None, file: int) -> int:
        fixed = 0 if place is None else 0x10  # MAP_FIXED, which Python's mmap does not know
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = self._mmap(place, self._size, access, mmap.MAP_SHARED | fixed, file, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "no memory could be mapped for the weights")
        return int(found)

    def _tensor(self, place: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * self._size).from_address(place)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _make_spare(self) -> torch.Tensor | None:
        if self._spare is None:
            self._files.append(self._file())
            self._places.append(self._map(None, self._files[1]))
            self._spare = self._tensor(self._places[1])
        return self._spare

    def _exchange(self) -> None:
        self._files.reverse()
        for place, file in zip(self._places, self._files, strict=True):
            self._map(place, file)

    def _settle(self) -> None:
        pass


class _CudaMemory:
    """What an address range of CUDA's can be made of."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._device = device
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device.index
        self._properties = properties
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._ask("cuMemGetAllocationGranularity", properties, recommended))

    def _ask(self, name: str, *args: Any) -> Any:
        code, *found = getattr(self._driver, name)(*args)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {code.name}")
        return found[0] if found else None

    def create(self, size: int) -> Any:
        # One handle for everything: what exchanging takes grows with their number.
        return self._ask("cuMemCreate", size, self._properties, 0)

    def release(self, handle: Any) -> None:
        self._ask("cuMemRelease", handle)

    def reserve(self, size: int) -> Any:
        return self._ask("cuMemAddressReserve", size, 0, 0, 0)

    def map(self, place: Any, size: int, handle: Any) -> None:
        self._ask("cuMemMap", place, size, 0, handle, 0)
        self._ask("cuMemSetAccess", place, size, [self._access], 1)

    def unmap(self, place: Any, size: int) -> None:
        self._ask("cuMemUnmap", place, size)

    def tensor(self, place: Any, size: int) -> torch.Tensor:
        return torch.as_tensor(_Range(int(place), size), device=self._device)


class _Range:
    """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""

    def __init__(self, place: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (place, False),
            "version": 3,
        }


class _CudaPages(Pages):
    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._memory = memory = _CudaMemory(device)
        self._size = -(-size // memory.granularity) * memory.granularity
        self._live = memory.create(self._size)
        self._live_at = memory.reserve(self._size)
        memory.map(self._live_at, self._size, self._live)
        self.live = memory.tensor(self._live_at, self._size)
        self._other: Any = None
        """The spare memory's handle, and where it is, unless that is not ``_settled``."""
        self._other_at: Any = None
        self._settled = True
        self._spare: torch.Tensor | None = None

    def _make_spare(self) -> torch.Tensor | None:
        self._settle(keep=True)
        if self._other is None:
            if not _make_room(self._device, self._size + SPARE_BYTES):
                return None
            memory = self._memory
            self._other = memory.create(self._size)
            if self._other_at is None:
                self._other_at = memory.reserve(self._size)
            memory.map(self._other_at, self._size, self._other)
            if self._spare is None:
                self._spare = memory.tensor(self._other_at, self._size)
            self.fresh = True
        return self._spare

    def _exchange(self) -> None:
        torch.cuda.synchronize(self._device)
        # Memory may be in two places at once: for where the spare one is there is time later.
        self._memory.unmap(self._live_at, self._size)
        self._memory.map(self._live_at, self._size, self._other)
        self._live, self._other = self._other, self._live
        self._settled = False

    def _settle(self, keep: bool = False) -> None:
        if self._settled:
            return
        self._memory.unmap(self._other_at, self._size)
        if keep or torch.cuda.mem_get_info(self._device)[0] >= _LEFT_FREE:
            self._memory.map(self._other_at, self._size, self._other)
        else:
            self._memory.release(self._other)
            self._other = None
        self._settled = True


def _make_room(device: torch.device, size: int) -> bool:
    """Whether so many bytes are free, or what torch keeps for later has been given back for it."""
    free: int = torch.cuda.mem_get_info(device)[0]
    if free >= size:
        return True
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free + kept < size:
        return False
    torch.cuda.empty_cache()
    return bool(torch.cuda.mem_get_info(device)[0] >= size)


def make_pages(size: int, device: torch.device) -> Pages | None:
    """``size`` bytes of live memory on the device; None where it has no such memory to give.

    Raises:
        RuntimeError, OSError: the system did not do what it should.
    """
    if device.type == "cuda":
        try:
            import cuda.bindings.driver  # noqa: F401
        except ImportError:
            return None
        return _CudaPages(size, device) if _make_room(device, size + SPARE_BYTES) else None
    return _FilePages(size) if hasattr(os, "memfd_create") else None
