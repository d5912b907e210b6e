"""Two physical memories, live and spare, that can exchange their addresses.

New weights are written to the spare memory while the engine reads the live memory. Then the two
memories exchange their addresses, and no byte is copied. The live address never changes, because
CUDA graphs and other code hold pointers to it. For 16 GB on an H200, the exchange takes 1 ms,
and a copy would take 8 ms.

On CUDA the exchange uses the driver's virtual memory management
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#virtual-memory-management). On a CPU it uses
``mmap`` with two files in memory.
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

from sglrl.errors import EngineError

from .host_copy import HostCopy, Ranges

SPARE_BYTES = 1 << 30
"""Free GPU memory, in bytes, that staging leaves to the engine."""
_LEFT_FREE = 4 << 30
"""Minimum free bytes of the GPU. With fewer, the spare memory is freed after each update."""


class Pages(ABC):
    """A live memory, and a spare memory that can replace it.

    Attributes:
        live: the memory in use, uint8, shape (size,).
        fresh: whether the spare memory has never been live.
    """

    live: torch.Tensor

    def __init__(self, device: torch.device) -> None:
        self.fresh = True
        self._host = HostCopy(device)
        self._lock = threading.Lock()
        self._readers = 0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep ``make_live`` from exchanging the memories while another thread reads ``live``.

        Several threads may read at the same time, for any duration.
        """
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def spare(self) -> torch.Tensor | None:
        """Return the spare memory, uint8, shape (size,). Create it if necessary.

        Return None if there is no room for the spare memory.
        """
        with self._lock:
            return self._make_spare()

    def make_live(self) -> None:
        """Make the contents of the spare memory live.

        This exchanges the two memories. While another thread is ``reading``, the contents of the
        spare memory are copied instead, because reading may take long. On CUDA, the copy runs on
        the current stream. Only readers and GPU work that was already launched may use the
        memories during this call.
        """
        with self._lock:
            if not self._readers:
                self._exchange()
                self.fresh = False
                return
        spare = self.spare()
        assert spare is not None
        self.live.copy_(spare)

    def settle(self) -> None:
        """Make the old live memory the spare memory, or free it if the GPU has too little memory.

        Call this after ``make_live``, when nothing waits for the engine.
        """
        with self._lock:
            self._settle()

    def release(self, kept: Ranges) -> None:
        """Free both memories. Their addresses stay reserved.

        Args:
            kept: the byte ranges of the live memory to copy to the memory of the host.

        Raises:
            EngineError: the host has too little memory for ``kept``, or a thread is ``reading``.
                Nothing was freed.
        """
        with self._lock:
            if self._readers:
                raise EngineError("the weights are being copied; call again later")
            self._host.save(self.live, kept)
            self._free()
            self.fresh = True

    def restore(self) -> None:
        """Allocate the live memory again, and load the ranges that ``release`` has kept.

        The other bytes have arbitrary values.

        Raises:
            RuntimeError: the GPU has too little free memory. Nothing was allocated.
        """
        with self._lock:
            self._take()
            self._host.load(self.live)

    def drop_spare(self) -> None:
        """Free the spare memory."""
        with self._lock:
            self._drop_spare()
            self.fresh = True

    @abstractmethod
    def _make_spare(self) -> torch.Tensor | None: ...

    @abstractmethod
    def _exchange(self) -> None: ...

    @abstractmethod
    def _settle(self) -> None: ...

    @abstractmethod
    def _free(self) -> None: ...

    @abstractmethod
    def _take(self) -> None: ...

    @abstractmethod
    def _drop_spare(self) -> None: ...


class _FilePages(Pages):
    """Pages on a CPU."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.device("cpu"))
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
        fixed = 0 if place is None else 0x10  # MAP_FIXED, which Python's mmap lacks
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._mmap(place, self._size, access, mmap.MAP_SHARED | fixed, file, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "no memory could be mapped for the weights")
        return int(address)

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

    def _free(self) -> None:
        for file in self._files:
            self._empty(file)

    def _take(self) -> None:
        # The file is as long as before. The kernel allocates its pages on first use.
        pass

    def _drop_spare(self) -> None:
        for file in self._files[1:]:
            self._empty(file)

    def _empty(self, file: int) -> None:
        os.ftruncate(file, 0)
        os.ftruncate(file, self._size)


class _CudaMemory:
    """CUDA's physical memory and address ranges on one device."""

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
        code, *results = getattr(self._driver, name)(*args)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {code.name}")
        return results[0] if results else None

    def create(self, size: int) -> Any:
        # Use a single handle, because an exchange takes longer with more handles.
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
    """An address range that ``torch.as_tensor`` accepts.

    See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.
    """

    def __init__(self, place: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (place, False),
            "version": 3,
        }


class _CudaPages(Pages):
    """Pages on a GPU."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(device)
        self._device = device
        self._memory = memory = _CudaMemory(device)
        self._size = -(-size // memory.granularity) * memory.granularity
        self._live = memory.create(self._size)
        self._live_at = memory.reserve(self._size)
        memory.map(self._live_at, self._size, self._live)
        self.live = memory.tensor(self._live_at, self._size)
        self._other: Any = None
        """The handle of the spare memory."""
        self._other_at: Any = None
        """The address of the spare memory. ``_other`` is mapped there only if ``_settled``."""
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
        # Until ``_settle``, the new live memory is mapped at both addresses.
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

    def _free(self) -> None:
        torch.cuda.synchronize(self._device)
        self._drop_spare()
        self._memory.unmap(self._live_at, self._size)
        self._memory.release(self._live)

    def _take(self) -> None:
        torch.cuda.empty_cache()
        handle = self._memory.create(self._size)
        try:
            self._memory.map(self._live_at, self._size, handle)
        except RuntimeError:
            self._memory.release(handle)
            raise
        self._live = handle

    def _drop_spare(self) -> None:
        self._settle(keep=True)
        if self._other is not None:
            self._memory.unmap(self._other_at, self._size)
            self._memory.release(self._other)
            self._other = None


def _make_room(device: torch.device, size: int) -> bool:
    """Return True if ``size`` bytes are free. Empty torch's cache if that is necessary."""
    free: int = torch.cuda.mem_get_info(device)[0]
    if free >= size:
        return True
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free + kept < size:
        return False
    torch.cuda.empty_cache()
    return bool(torch.cuda.mem_get_info(device)[0] >= size)


def make_pages(size: int, device: torch.device) -> Pages | None:
    """Allocate ``size`` bytes of live memory on the device.

    Returns:
        None if the system cannot exchange memories, or the GPU has no room for the memory.

    Raises:
        RuntimeError: a call of the CUDA driver failed.
        OSError: a system call failed.
    """
    if device.type == "cuda":
        try:
            import cuda.bindings.driver  # noqa: F401
        except ImportError:
            return None
        return _CudaPages(size, device) if _make_room(device, size + SPARE_BYTES) else None
    return _FilePages(size) if hasattr(os, "memfd_create") else None
