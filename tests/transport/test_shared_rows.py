"""Rows in memory that two processes share.

A row does not change while a reader holds it, and no row is lost.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglrl.errors import ProtocolError
from sglrl.transport import shared_rows
from sglrl.transport.shared_rows import TOGETHER, RowsReader, RowsWriter, writer_for
from sglrl.wire.calls import RowsOffer

WIDTH = 20_000
ROW_BYTES = 4 * WIDTH


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the shared memory to two pieces."""
    monkeypatch.setattr(shared_rows, "MAX_BYTES", 40 * ROW_BYTES)


@pytest.fixture
def ends() -> Iterator[tuple[RowsWriter, RowsReader]]:
    writer = RowsWriter(ROW_BYTES)
    yield writer, RowsReader(os.getpid(), writer.offer)
    os.close(writer.offer.fd)


def test_a_row_arrives_and_its_slot_is_free_after_its_last_use(
    ends: tuple[RowsWriter, RowsReader],
) -> None:
    writer, reader = ends
    (slot,) = writer.take(1)
    writer[slot][:] = np.arange(WIDTH)
    (view,) = reader.views([slot])
    assert view.readonly
    assert len(view) == ROW_BYTES
    row = np.frombuffer(view, "<f4")
    assert not row.flags.writeable
    part = row[5:9].reshape(2, 2)
    del view, row
    gc.collect()
    assert reader.held == 1
    assert slot not in writer.take(2 * TOGETHER - 1)
    assert part.tolist() == [[5, 6], [7, 8]]
    del part
    assert reader.held == 0
    assert writer.take(1) == [slot]


def test_all_slots_and_none(ends: tuple[RowsWriter, RowsReader]) -> None:
    writer, reader = ends
    pieces: list[Any] = []
    writer.on_piece = pieces.append
    count = 2 * TOGETHER
    assert writer.take(count + 1) == []
    slots = writer.take(count)
    assert slots == list(range(count))
    assert [piece.shape for piece in pieces] == [(TOGETHER, WIDTH)] * 2
    for slot in slots:
        writer[slot].fill(slot)
    views = reader.views(slots)
    for slot, view in zip(slots, views, strict=True):
        assert set(np.frombuffer(view, "<f4").tolist()) == {slot}
    assert writer.take(1) == []
    del views[3]
    assert writer.take(2) == []
    assert writer.take(1) == [3]
    writer.give_back([3])
    assert writer.take(1) == [3]


@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("cannot be pinned")])
def test_memory_that_is_not_to_be_had(
    ends: tuple[RowsWriter, RowsReader], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More memory is requested only once. The existing memory stays in use."""
    writer, _ = ends
    assert writer.take(TOGETHER) == list(range(TOGETHER))
    asked = 0

    def refused(*args: Any) -> None:
        nonlocal asked
        asked += 1
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(os, "posix_fallocate", refused)
    else:
        writer.on_piece = refused
    for _ in range(3):
        assert writer.take(1) == []
    assert asked == 1
    writer.give_back([3])
    assert writer.take(1) == [3]


def test_slots_that_cannot_be_given_out(ends: tuple[RowsWriter, RowsReader]) -> None:
    writer, reader = ends
    slots = writer.take(3)
    for wrong in ([-1], [2 * TOGETHER], [1 << 62], [0, 1, 0], [2, -1]):
        with pytest.raises(ProtocolError, match="cannot be given out"):
            reader.views(wrong)
        assert reader.held == 0
    # The slots before the wrong slot are free again.
    assert writer.take(2) == [0, 1]
    held = reader.views(slots[2:])
    with pytest.raises(ProtocolError, match="slot 2 of 32"):
        reader.views(slots)
    assert len(held) == reader.held == 1


def test_files_that_are_not_these(tmp_path: Any) -> None:
    pid = os.getpid()
    writer = RowsWriter(ROW_BYTES)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, os.fstat(writer.offer.fd).st_size)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, os.fstat(writer.offer.fd).st_size)
    read, write = os.pipe()
    own, token = writer.offer.fd, writer.offer.token
    for offer in (
        *(RowsOffer(fd, ROW_BYTES, token) for fd in (plain, unsealed, read, write, 999_999, -1)),
        RowsOffer(own, ROW_BYTES + 4 * mmap.PAGESIZE, token),
        *(RowsOffer(own, size, token) for size in (0, -4, 3, 1 << 62)),
        # A worker on another machine has the same process number and descriptor.
        RowsOffer(own, ROW_BYTES, token[::-1]),
    ):
        with pytest.raises(OSError, match=r".+"):
            RowsReader(pid, offer)
    with pytest.raises(OSError, match=r".+"):
        RowsReader(0, writer.offer)
    # No process can shorten the memory, which would kill its readers.
    with pytest.raises(PermissionError):
        os.ftruncate(writer.offer.fd, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writer.offer.fd, shared_rows._ADD_SEALS, 8)
    for fd in (plain, unsealed, read, write, writer.offer.fd):
        os.close(fd)


def test_rows_that_messages_are_better_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert writer_for(4096) is None
    assert writer_for(1 << 40) is None
    found = writer_for(ROW_BYTES)
    assert found is not None
    os.close(found.offer.fd)

    def refused(*args: object) -> int:
        raise OSError("not allowed here")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert writer_for(ROW_BYTES) is None


def test_what_is_held_outlives_the_worker() -> None:
    """The worker is killed. Its memory stays while a reader holds a row."""
    program = f"""
import sys
from sglrl.transport import shared_rows
shared_rows.MAX_BYTES = {shared_rows.MAX_BYTES}
writer = shared_rows.RowsWriter({ROW_BYTES})
for slot in writer.take(2):
    writer[slot].fill(slot + 7)
print(writer.offer.fd, writer.offer.token, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        fd, token = process.stdout.readline().decode().split()
        reader = RowsReader(process.pid, RowsOffer(int(fd), ROW_BYTES, token))
        _, view = reader.views([0, 1])
        process.kill()
    del reader
    gc.collect()
    assert set(np.frombuffer(view, "<f4").tolist()) == {8.0}


# Python warns about forks with threads. This child uses no threads.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_keeps_what_it_has(ends: tuple[RowsWriter, RowsReader]) -> None:
    """Dropping a row in the child does not free the parent's row, and the other way round."""
    writer, reader = ends
    first, second = writer.take(2)
    view, other = reader.views([first, second])
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        del view
        gc.collect()
        os.write(write, b"+")
        os._exit(0)
    assert os.read(read, 1) == b"+"
    assert os.waitpid(pid, 0)[1] == 0
    assert len(view) == len(other) == ROW_BYTES
    del view, other
    assert not {first, second} & set(writer.take(2 * TOGETHER - 2))
    os.close(read)
    os.close(write)


class Rows(RuleBasedStateMachine):
    """Compare the rows with a dictionary: which row is held, and its content."""

    @initialize()
    def begin(self) -> None:
        self.writer = RowsWriter(ROW_BYTES)
        self.reader = RowsReader(os.getpid(), self.writer.offer)
        self.taken: dict[int, float] = {}
        """The written value by slot, for rows that are not sent yet."""
        self.held: list[tuple[np.ndarray, float]] = []
        self.written = 0.0

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        room = 2 * TOGETHER - len(self.taken) - len(self.held)
        slots = self.writer.take(count)
        assert len(slots) == (count if count <= room else 0)
        assert not set(slots) & set(self.taken)
        for slot in slots:
            self.written += 1
            self.writer[slot].fill(self.written)
            self.taken[slot] = self.written

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def send(self, data: Any) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.taken)), unique=True, min_size=1))
        for slot, view in zip(slots, self.reader.views(slots), strict=True):
            self.held.append((np.frombuffer(view, "<f4"), self.taken.pop(slot)))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[slot]
        self.writer.give_back([slot])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        del self.held[at]

    @invariant()
    def nothing_has_changed(self) -> None:
        if not hasattr(self, "held"):
            return
        assert self.reader.held == len(self.held)
        for row, value in self.held:
            assert row[0] == row[-1] == value

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            os.close(self.writer.offer.fd)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
