"""Rows of logprobs in memory that a worker and its driver share.

A row with the logprobs of a whole vocabulary has half a megabyte, and a step yields dozens of rows.
A socket takes longer to send them than the model takes to compute them. Instead, the worker writes
each row into a slot of a file without a name (``memfd_create``). The driver opens the file through
``/proc``. The worker's message contains the numbers of the slots, and the driver returns views of
the slots. A slot is free again when no view of it is left. If the system does not support shared
memory, or too few slots are free, rows are sent as raw frames.

The file also has one byte per slot. The worker sets the byte when it takes the slot, and the driver
clears the byte when the slot is free. At any time only one side may change the byte, so no lock is
needed.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError
from ..wire.calls import RowsOffer

MIN_BYTES: Final = 64 << 10
"""Minimum bytes of a row. Copying smaller rows into a message is faster than sharing them."""
MAX_BYTES: Final = 512 << 20
"""Maximum bytes of all rows of a worker. More memory is allocated only when too few of the rows
that have memory are free."""
TOGETHER: Final = 16
"""Number of rows per piece of memory. Memory is allocated in pieces."""
_SEALS: Final = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_GET_SEALS: Final = 1034
_ADD_SEALS: Final = 1033


class _Layout:
    """The layout of a file for rows of ``row_bytes``.

    The file has one byte per slot, then pieces of ``TOGETHER`` rows. Each piece starts on a page.
    """

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self.piece_bytes = _pages(TOGETHER * row_bytes)
        self.count = MAX_BYTES // self.piece_bytes * TOGETHER
        self.begin = _pages(self.count)
        self.size = self.begin + self.count // TOGETHER * self.piece_bytes

    def offset(self, slot: int) -> int:
        piece, row = divmod(slot, TOGETHER)
        return self.begin + piece * self.piece_bytes + row * self.row_bytes


def _name(token: str) -> str:
    return f"sglrl-rows-{token}"


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class RowsWriter:
    """The worker's end of the shared memory. Only one thread may use it.

    Attributes:
        offer: the data that the driver needs to open the file.
        rows: all rows, as float32 [pieces, TOGETHER, values of a row]. After ``take`` has returned
            a slot, row ``slot % TOGETHER`` of piece ``slot // TOGETHER`` may be written.
        on_piece: is called with each piece before its first use. If it raises ``RuntimeError``, no
            more pieces are added.
    """

    def __init__(self, row_bytes: int) -> None:
        layout = self._layout = _Layout(row_bytes)
        token = secrets.token_hex(8)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._fd = os.memfd_create(_name(token), flags)
        os.ftruncate(self._fd, layout.size)
        # The size is now fixed, so that no view can ever lie beyond the end of the file.
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
        self.offer = RowsOffer(self._fd, row_bytes, token)
        self.on_piece: Callable[[NDArray[np.float32]], None] = lambda piece: None
        self._pieces = 0
        self._most = layout.count // TOGETHER

    def take(self, count: int) -> list[int]:
        """Return ``count`` free slots in ascending order, or [] if there are fewer."""
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
        """Free taken slots whose numbers were not sent in a message."""
        for slot in slots:
            self._taken[slot] = 0

    def __getitem__(self, slot: int) -> NDArray[np.float32]:
        """Return the row of a slot: float32 [values of a row]."""
        row: NDArray[np.float32] = self.rows[slot // TOGETHER, slot % TOGETHER]
        return row

    def _grow(self) -> bool:
        layout = self._layout
        if self._pieces == self._most:
            return False
        begin = layout.offset(self._pieces * TOGETHER)
        try:
            # Without this, a write to memory that cannot be allocated would kill the process.
            os.posix_fallocate(self._fd, begin, layout.piece_bytes)
            self.on_piece(self.rows[self._pieces])
        except (OSError, RuntimeError):
            # Do not try again in each call of ``take``.
            self._most = self._pieces
            return False
        self._pieces += 1
        return True


class RowsReader:
    """The driver's end of the memory that one worker shares.

    Raises:
        OSError: this process cannot open the file, for example because the worker runs in another
            container.
    """

    def __init__(self, pid: int, offer: RowsOffer) -> None:
        if not 0 < offer.row_bytes <= MAX_BYTES // TOGETHER or offer.row_bytes % 4:
            raise OSError(f"{offer.row_bytes} bytes are no row")
        layout = self._layout = _Layout(offer.row_bytes)
        # If the worker's descriptor is a pipe, opening it must not block.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(f"/proc/{pid}/fd/{offer.fd}", flags)
        try:
            # Only files of ``memfd_create`` have seals.
            if fcntl.fcntl(fd, _GET_SEALS) != _SEALS or os.fstat(fd).st_size != layout.size:
                raise OSError("the file is not one of these")
            # A worker on another machine may have the process id of a worker on this machine.
            if _name(offer.token) not in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError("the file is that of another worker")
            self._memory = mmap.mmap(fd, layout.size)
        finally:
            os.close(fd)
        self._taken = np.frombuffer(self._memory, np.uint8, layout.count)
        self._held: dict[int, _Held] = {}
        _readers.add(self)

    def views(self, slots: Sequence[int]) -> list[memoryview]:
        """Return the rows of these slots, read-only, as uint8 [row bytes].

        A slot becomes free when its view and all objects made from the view are deleted.

        Raises:
            ProtocolError: a slot does not exist, or a view of it still exists.
        """
        layout, held = self._layout, self._held
        views = []
        for slot in slots:
            if not 0 <= slot < layout.count or slot in held:
                raise ProtocolError(f"slot {slot} of {layout.count} cannot be given out")
            row = np.frombuffer(self._memory, np.uint8, layout.row_bytes, layout.offset(slot))
            row.flags.writeable = False
            reference = held[slot] = _Held(row, self._free)
            reference.slot = slot
            views.append(memoryview(row))  # type: ignore[arg-type]
        return views

    @property
    def held(self) -> int:
        """Number of rows with a view that still exists."""
        return len(self._held)

    def keep(self) -> None:
        """Never free the rows that have a view now."""
        self._held.clear()

    def _free(self, reference: _Held) -> None:
        # This runs on the thread that deletes the last view. The entry must be deleted before the
        # byte is cleared, because the worker may then take the slot again.
        del self._held[reference.slot]
        self._taken[reference.slot] = 0


class _Held(weakref.ref[Any]):
    """A weak reference to the array that a view shows."""

    __slots__ = ("slot",)
    slot: int


_readers: weakref.WeakSet[RowsReader] = weakref.WeakSet()


def _before_fork() -> None:
    """Never free the current rows, because a forked child may go on using them unnoticed."""
    for reader in list(_readers):
        reader.keep()


if sys.platform == "linux":
    os.register_at_fork(before=_before_fork)


def writer_for(row_bytes: int) -> RowsWriter | None:
    """Return a writer for rows of this size.

    Returns:
        None if rows of this size are sent in messages, or if the system does not support sharing.
    """
    if row_bytes < MIN_BYTES or row_bytes > MAX_BYTES // TOGETHER or sys.platform != "linux":
        return None
    try:
        return RowsWriter(row_bytes)
    except OSError:
        return None
