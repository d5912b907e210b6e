"""Keep a rank's live weights in the memory of its host, for the worker that replaces it.

The memory belongs to the fork server, so it outlives the rank. The first page describes the
contents. While weights are copied into the memory, this page describes the memory as empty.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping

import msgspec
import torch

from sglrl.errors import WeightUpdateError
from sglrl.transport.system_limits import available_memory
from sglrl.weights.bucket_sender import perform
from sglrl.weights.link import Link
from sglrl.wire.weights import KeepWeights, RankAnswer, RestoreWeights

from .peer_copy import digest
from .side_stream import SideStream
from .weight_engine import WeightEngine, overwriting

KEEP, RESTORE = "keep", "restore"
_PIECE_BYTES = 32 << 20
"""The bytes of one copy on a GPU, a multiple of the page size. A step of the engine waits for the
current copy, which takes 0.6 ms on an H200."""
_PIECES_AHEAD = 16
"""The number of copies that may wait for the GPU. They finish even after ``cancel``."""
_LEFT_FREE = 0.05
"""Share of the available memory that stays free."""


class _Contents(msgspec.Struct, array_like=True, frozen=True):
    """The first page's content. ``digest`` covers the names, dtypes and shapes of the tensors."""

    version: int
    digest: str


class KeptWeights:
    """Copies one rank's live weights to the fork server's memory, and back.

    Args:
        path: the path of the memory. Empty if the rank's weights are not kept.
        stream: the stream on which the copies run.
        answer: sends an answer to the driver. This class calls it on any thread.
    """

    def __init__(
        self,
        engine: WeightEngine,
        path: str,
        stream: SideStream,
        answer: Callable[[RankAnswer], None],
    ) -> None:
        self._engine = engine
        self._path = path
        self._stream = stream
        self._answer = answer
        self._link: Link | None = None
        self._memory: _Memory | None = None
        self._restoring = -1
        """The id of the last ``RestoreWeights``."""

    def keep(self, message: KeepWeights) -> None:
        """Copy the live weights to the memory, and answer with the number of bytes."""
        link = self._fresh()

        def copy() -> int:
            live = self._engine.live.tensors()
            memory = self._mapped(_size(live))
            memory.say(None)
            with self._engine.live.reading(), self._stream.use():
                for number, (place, tensor) in enumerate(memory.places(live)):
                    if number % _PIECES_AHEAD == 0:
                        self._stream.synchronize()
                        link.check()
                    if tensor.is_cuda and tensor.is_contiguous():
                        memory.lock(place)
                        place.copy_(tensor, non_blocking=True)
                    else:
                        place.copy_(tensor)
                self._stream.synchronize()
            link.check()
            memory.say(_Contents(message.version, digest(live)))
            return memory.size

        self._run(link, message.id, KEEP, copy)

    def restore(self, message: RestoreWeights) -> None:
        """Copy the weights from the memory to the live weights, then answer True.

        Answer False if the memory holds weights of another version or model, or no weights.
        """
        link = self._fresh()
        self._restoring = message.id

        def copy() -> bool:
            live = self._engine.live.tensors()
            size = _size(live)
            if os.stat(self._path).st_size < size:
                return False
            memory = self._mapped(size)
            if memory.contents() != _Contents(message.version, digest(live)):
                return False
            with (
                overwriting(self._engine, message.id, message.version, message.timeout),
                self._stream.use(),
            ):
                for place, tensor in memory.places(live):
                    link.check()
                    tensor.copy_(place)
                self._stream.synchronize()
                link.check()
            return True

        self._run(link, message.id, RESTORE, copy)

    def cancel(self) -> None:
        """Stop the current copy, and release the engine at once."""
        if self._link is not None:
            self._link.abandon()
        self._engine.release(self._restoring, None)

    def _mapped(self, size: int) -> _Memory:
        if self._memory is None or self._memory.size < size:
            self._memory = _Memory(self._path, size)
        return self._memory

    def _fresh(self) -> Link:
        if self._link is not None:
            self._link.abandon()
        self._link = Link()
        return self._link

    def _run(self, link: Link, id_: int, phase: str, copy: Callable[[], object]) -> None:
        def job() -> None:
            self._answer(perform(id_, phase, copy))
            link.abandon()

        link.submit(job)


class _Memory:
    """The memory of the fork server, mapped into this process.

    Args:
        size: the minimum size of the memory, in bytes.

    Raises:
        WeightUpdateError: the host has too little memory for this size.
    """

    def __init__(self, path: str, size: int) -> None:
        file = os.open(path, os.O_RDWR)
        try:
            now = os.fstat(file).st_size
            if size > now:
                room = int(available_memory() * (1 - _LEFT_FREE))
                if size - now > room:
                    raise WeightUpdateError(
                        f"keeping these weights takes {size:,} bytes of memory, and the host has "
                        f"room for {now + room:,}"
                    )
                # Allocate now, because a page that is missing later would cause a SIGBUS.
                os.posix_fallocate(file, 0, size)
            self.size = os.fstat(file).st_size
            self._map = mmap.mmap(file, self.size)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        finally:
            os.close(file)
        self._locked: set[int] = set()
        """The addresses of pieces that are page-locked."""

    def contents(self) -> _Contents | None:
        """Return the contents of the first page. None if the memory has no complete weights."""
        length = int.from_bytes(self._map[:8], "little")
        return msgspec.msgpack.decode(self._map[8 : 8 + length], type=_Contents) if length else None

    def say(self, contents: _Contents | None) -> None:
        """Write a description of the contents to the first page."""
        body = b"" if contents is None else msgspec.msgpack.encode(contents)
        self._map[8 : 8 + len(body)] = body
        # Write the length last, because a length above 0 makes the contents valid.
        self._map[:8] = len(body).to_bytes(8, "little")

    def lock(self, place: torch.Tensor) -> None:
        """Page-lock a piece, so that a GPU copies to it at the speed of its bus.

        Locking delays other CUDA calls, so each piece is locked separately. Locking all of the
        memory at once would take 6 s for 16 GB on an H200. Pieces stay locked until the exit.
        """
        address = place.data_ptr()
        if address not in self._locked:
            pages = -(-place.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            code = torch.cuda.cudart().cudaHostRegister(address, pages, 0)
            torch.cuda.check_error(int(code))
            self._locked.add(address)

    def places(
        self, live: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pairs: a place in the memory, and the tensor that it stores, with equal shapes.

        Large contiguous tensors are split into pieces. No two pieces share a page.
        """
        memory = self._bytes
        at = mmap.PAGESIZE
        for tensor in live.values():
            if tensor.nbytes:
                place = memory[at : at + tensor.nbytes].view(tensor.dtype)
                if tensor.is_contiguous():
                    size = _PIECE_BYTES // tensor.itemsize
                    yield from zip(place.split(size), tensor.view(-1).split(size), strict=True)
                else:
                    yield place.view(tensor.shape), tensor
            at = _after(at, tensor)


def _size(live: Mapping[str, torch.Tensor]) -> int:
    at = mmap.PAGESIZE
    for tensor in live.values():
        at = _after(at, tensor)
    return at


def _after(at: int, tensor: torch.Tensor) -> int:
    size: int = tensor.nbytes
    return at + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
