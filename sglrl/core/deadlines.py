"""The deadlines of calls, earliest first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .calls import Call

_SPARE = 64
"""Entries of ended calls that may be kept, in addition to twice the live calls."""


class Deadlines:
    """The deadlines of live calls. Entries of ended calls are removed later.

    Args:
        calls: the live calls by id, which the caller changes.
    """

    def __init__(self, calls: dict[int, Call]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Return the number of entries, including those of ended calls."""
        return len(self._heap)

    def add(self, id_: int, deadline: float) -> None:
        heappush(self._heap, (deadline, id_))
        if len(self._heap) > _SPARE + 2 * len(self._calls):
            self._heap = [entry for entry in self._heap if entry[1] in self._calls]
            heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline of a live call, or None if no live call has a deadline."""
        heap = self._heap
        while heap and heap[0][1] not in self._calls:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now: float) -> Call | None:
        """Remove and return a live call whose deadline has passed, if any."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            call = self._calls.get(heappop(heap)[1])
            if call is not None:
                return call
        return None
