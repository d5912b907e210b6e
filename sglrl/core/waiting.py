"""Calls that wait, in the order in which they are served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from .calls import QUEUED, Call

Entry = tuple[int, int, int, Call]
_numbers: Final = count()


class Waiting:
    """A queue by priority and age. A call may stand in it twice; one that is no longer QUEUED is
    passed over.

    Nearly all come in that very order: those are a line, whose ends are reached in O(1). A heap has
    the others. ``len`` counts all that stand in it.
    """

    __slots__ = ("late", "line")

    def __init__(self) -> None:
        self.line: deque[Call] = deque()
        self.late: list[Entry] = []

    def __len__(self) -> int:
        return len(self.line) + len(self.late)

    def __iter__(self) -> Iterator[Call]:
        return iter([*self.line, *(entry[3] for entry in self.late)])

    def push(self, call: Call) -> None:
        line = self.line
        if line and call.goes_before(line[-1]):
            heappush(self.late, (-call.priority, call.id, next(_numbers), call))
        else:
            line.append(call)

    def first(self) -> Call | None:
        """Who is served next."""
        line, late = self.line, self.late
        while late and late[0][3].state != QUEUED:
            heappop(late)
        while line:
            call: Call = line[0]
            if call.state == QUEUED:
                return late[0][3] if late and late[0][3].goes_before(call) else call
            line.popleft()
        return late[0][3] if late else None

    def take(self) -> None:
        """Take out who is ``first``."""
        if self.late and self.late[0][3] is self.first():
            heappop(self.late)
        else:
            self.line.popleft()

    def bound(self, most: int) -> None:
        """Let go of those that wait no longer, if there are more than ``most`` in all."""
        if len(self) > most:
            self.line = deque([call for call in self.line if call.state == QUEUED])
            self.late = [entry for entry in self.late if entry[3].state == QUEUED]
            heapify(self.late)

    def clear(self) -> None:
        self.line.clear()
        self.late.clear()
