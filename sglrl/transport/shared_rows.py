"""Rows of logprobs in memory that a worker and its driver both have.

A row of a whole vocabulary is half a megabyte, and a step brings dozens of them: a socket takes
longer for them than the model takes to compute them. Here the worker writes each into a slot of a
file without a name (``memfd_create``), which the driver has opened through ``/proc``; the message
says which slots, and the driver hands out views of them. A slot is free again when no view of it is
left. Where anything of this is not to be had, and while all slots are taken, rows are raw frames.

Beside the rows the file has one byte a slot. The worker sets it when it takes the slot, and the
driver clears it. No slot has two who may change its byte, so there is no lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError
from ..wire.calls import RowsOffer

LEAST_BYTES: Final = 64 << 10
"""Of a row. Smaller ones are copied into their message faster than all this is done."""
MOST_BYTES: Final = 512 << 20
"""Of all rows of a worker, and of the memory that is taken: as many rows as were needed at once."""
TOGETHER: Final = 16
"""Rows in one piece of memory."""
_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_GET_SEALS: Final = 1034
_ADD_SEALS: Final = 1033


class _Layout:
    """Where things are in a file for rows of ``row_bytes``: the slots' bytes, then pieces of
    ``TOGETHER`` rows, each at the begin of a page."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.piece_bytes = _pages(TOGETHER * row_bytes)
        self.count = MOST_BYTES // self.piece_bytes * TOGETHER
        self.begin = _pages(self.count)
        self.size = self.begin + self.count // TOGETHER * self.piece_bytes

    def offset(self, slot: int) -> int:
        piece, row = divmod(slot, TOGETHER)
        return self.begin + piece * self.piece_bytes + row * self.row_bytes


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class RowsWriter:
    """The worker's end. Belongs to one thread.

    Attributes:
        offer: what the driver needs to open it.
        rows: float32 [pieces, TOGETHER, row]. Row ``slot % TOGETHER`` of piece
            ``slot // TOGETHER`` may be written to once ``take`` has given the slot.
        on_piece: called with a piece before it is used for the first time. If it raises
            ``RuntimeError``, there are no more pieces.
    """

    def __init__(self, row_bytes: int) -> None:
        layout = self._layout = _Layout(row_bytes)
        self._fd = os.memfd_create("sglrl-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, layout.size)
        # So that nobody's view can ever be behind the end.
        fcntl.fcntl(self._fd, _ADD_SEALS, _SEALS)
        memory = mmap.mmap(self._fd, layout.size)
        self._taken = np.frombuffer(memory, np.uint8, layout.count)
        self.rows: NDArray[np.float32] = np.ndarray(
            (layout.count // TOGETHER, TOGETHER, row_bytes // 4),
            "<f4",
            memory,
            layout.begin,
            (layout.piece_bytes, row_bytes, 4),
        )
        self.offer = RowsOffer(self._fd, row_bytes)
        self.on_piece: Callable[[NDArray[np.float32]], None] = lambda piece: None
        self._pieces = 0
        self._most = layout.count // TOGETHER

    def take(self, count: int) -> list[int]:
        """So many free slots, in rising order; [] if there are fewer."""
        while True:
            free = np.flatnonzero(self._taken[: self._pieces * TOGETHER] == 0)
            if len(free) >= count:
                break
            if not self._grow():
                return []
        slots = free[:count]
        self._taken[slots] = 1
        return list(map(int, slots))

    def give_back(self, slots: Sequence[int]) -> None:
        """That no message has named."""
        for slot in slots:
            self._taken[slot] = 0

    def __getitem__(self, slot: int) -> NDArray[np.float32]:
        """float32 [row]."""
        row: NDArray[np.float32] = self.rows[slot // TOGETHER, slot % TOGETHER]
        return row

    def _grow(self) -> bool:
        layout = self._layout
        if self._pieces == self._most:
            return False
        begin = layout.offset(self._pieces * TOGETHER)
        try:
            # Memory that is not there would end the process when it is written to.
            os.posix_fallocate(self._fd, begin, layout.piece_bytes)
            self.on_piece(self.rows[self._pieces])
        except (OSError, RuntimeError):
            # Not to be tried again with every query.
            self._most = self._pieces
            return False
        self._pieces += 1
        return True


class RowsReader:
    """The driver's end.

    Raises:
        OSError: there is no such file for this process. (The worker is in another container, say.)
    """

    def __init__(self, pid: int, offer: RowsOffer) -> None:
        if not 0 < offer.row_bytes <= MOST_BYTES // TOGETHER or offer.row_bytes % 4:
            raise OSError(f"{offer.row_bytes} bytes are no row")
        layout = self._layout = _Layout(offer.row_bytes)
        # Whatever a worker names may be a pipe.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"/proc/{pid}/fd/{offer.fd}", flags)
        try:
            # Only files of ``memfd_create`` have seals.
            if fcntl.fcntl(fd, _GET_SEALS) != _SEALS or os.fstat(fd).st_size != layout.size:
                raise OSError("the file is not one of these")
            self._memory = mmap.mmap(fd, layout.size)
        finally:
            os.close(fd)
        self._taken = np.frombuffer(self._memory, np.uint8, layout.count)
        self._held: dict[int, _Held] = {}
        _readers.add(self)

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """The rows, read-only, as uint8 [row bytes]. Each slot is free when its view, and what was
        made of it, has gone.

        Raises:
            ProtocolError: there is no such slot, or somebody has it.
        """
        layout, held = self._layout, self._held
        found = []
        for slot in slots:
            if not 0 <= slot < layout.count or slot in held:
                raise ProtocolError(f"slot {slot} of {layout.count} cannot be given out")
            row = np.frombuffer(self._memory, np.uint8, layout.row_bytes, layout.offset(slot))
            row.flags.writeable = False
            reference = held[slot] = _Held(row, self._free)
            reference.slot = slot
            found.append(memoryview(row))  # type: ignore[arg-type]
        return found

    @property
    def held(self) -> int:
        """Rows that somebody still has."""
        return len(self._held)

    def keep(self) -> None:
        """What somebody has now is theirs for ever."""
        self._held.clear()

    def _free(self, reference: _Held) -> None:
        # On whatever thread dropped the last view. First: then the worker may take the slot again.
        del self._held[reference.slot]
        self._taken[reference.slot] = 0


class _Held(weakref.ref[Any]):
    """Of what a view looks at."""

    __slots__ = ("slot",)
    slot: int


_readers: weakref.WeakSet[RowsReader] = weakref.WeakSet()


def _before_fork() -> None:
    """A child has what its parent has, but does not say when it is done with it."""
    for reader in list(_readers):
        reader.keep()


if sys.platform == "linux":
    os.register_at_fork(before=_before_fork)


def writer_for(row_bytes: int) -> RowsWriter | None:
    """None: rows of this size are better off in messages, or the system has none of this."""
    if row_bytes < LEAST_BYTES or row_bytes > MOST_BYTES // TOGETHER or sys.platform != "linux":
        return None
    try:
        return RowsWriter(row_bytes)
    except OSError:
        return None
