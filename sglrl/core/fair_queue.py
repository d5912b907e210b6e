"""Queues of waiting calls, in the order in which the calls are served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final

from .calls import QUEUED, Call
from .clients import ClientState

_SPARE: Final = 64
"""Entries of a client that a queue may keep, in addition to twice the client's waiting calls."""

Entry = tuple[int, int, int, Call]
_numbers: Final = count()


class Waiting:
    """The calls of one client, by priority and age.

    A call may be in the queue twice. Calls that are no longer QUEUED are skipped, but ``len``
    counts them.

    Attributes:
        line: the calls that arrived in the order of service. Nearly all calls do, so that ``push``
            and ``first`` mostly cost O(1).
        late: a heap of the other calls.
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
        """Return the call that is served next."""
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
        """Remove the call that ``first`` returns."""
        if self.late and self.late[0][3] is self.first():
            heappop(self.late)
        else:
            self.line.popleft()

    def bound(self, most: int) -> None:
        """Remove the calls that no longer wait, if the queue has more than ``most`` entries."""
        if len(self.line) + len(self.late) > most:
            self.line = deque([call for call in self.line if call.state == QUEUED])
            self.late = [entry for entry in self.late if entry[3].state == QUEUED]
            heapify(self.late)

    def clear(self) -> None:
        self.line.clear()
        self.late.clear()


class _Lane(Waiting):
    """The calls of one client in a ``FairQueue``.

    Attributes:
        entry: number of the client's valid entry in the heap of the queue; -1 if it has none.
        priority: the priority in that entry.
    """

    __slots__ = ("client", "entry", "priority")

    def __init__(self, client: ClientState) -> None:
        super().__init__()
        self.client = client
        self.entry = -1
        self.priority = 0


Turn = tuple[int, int, int, _Lane]


class FairQueue:
    """A queue of the calls of several clients, in the order of ``Call.goes_before``.

    The order is by priority. Within one priority clients take turns. Within one client the order is
    by age. A call may be in the queue twice. The queue skips calls that are no longer QUEUED, and
    all calls of a client that is ``blocked``.

    A heap finds the next client. An entry of the heap may be outdated: the client may have been
    served since, by this or another queue, and then has a later turn than in the entry. ``first``
    corrects outdated entries at the top of the heap. A call therefore costs O(log clients).
    """

    __slots__ = ("_heap", "_lanes")

    def __init__(self) -> None:
        self._lanes: dict[ClientState, _Lane] = {}
        self._heap: list[Turn] = []

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Call]:
        return iter([call for lane in self._lanes.values() for call in lane])

    def push(self, call: Call) -> None:
        client = call.client
        assert client is not None
        lane = self._lanes.get(client)
        if lane is None:
            lane = self._lanes[client] = _Lane(client)
        lane.push(call)
        if len(lane.line) + len(lane.late) > _SPARE + 2 * client.waiting:
            self.sweep(client)
        if lane.entry < 0:
            # The lane may contain skipped calls, which may be served before this call.
            self.rejoin(client)
        elif call.priority > lane.priority:
            self._enter(lane, call.priority)

    def first(self) -> Call | None:
        """Return the call that is served next."""
        heap = self._heap
        while heap:
            priority, turn, number, lane = heap[0]
            if number != lane.entry:
                heappop(heap)
                continue
            client = lane.client
            if client.unread >= client.max_unread:
                heappop(heap)
                lane.entry = -1
                client.parked[self] = None
                continue
            call = lane.first()
            if call is None:
                heappop(heap)
                lane.entry = -1
                del self._lanes[client]
            elif len(heap) == 1 or (turn == client.turn and priority == -call.priority):
                # A single entry is the next one even if it is outdated.
                return call
            else:
                lane.priority = call.priority
                lane.entry = number = next(_numbers)
                heapreplace(heap, (-call.priority, client.turn, number, lane))
        return None

    def take(self, call: Call) -> None:
        """Remove the call that ``first`` returned."""
        assert call.client is not None
        self._lanes[call.client].take()

    def rejoin(self, client: ClientState) -> None:
        """Add an entry for a client that has none, so that ``first`` considers its calls again."""
        lane = self._lanes.get(client)
        if lane is not None and lane.entry < 0:
            call = lane.first()
            if call is None:
                del self._lanes[client]
            else:
                self._enter(lane, call.priority)

    def sweep(self, client: ClientState) -> None:
        """Remove calls of a client that no longer wait.

        Nothing happens while the client has at most ``_SPARE`` entries more than twice the number
        of its waiting calls.
        """
        lane = self._lanes.get(client)
        if lane is not None:
            lane.bound(_SPARE + 2 * client.waiting)

    def drop(self, client: ClientState) -> None:
        """Remove a client that has no waiting calls."""
        lane = self._lanes.pop(client, None)
        if lane is not None:
            lane.entry = -1

    def clear(self) -> None:
        for lane in self._lanes.values():
            lane.entry = -1
        self._lanes.clear()
        self._heap.clear()

    def _enter(self, lane: _Lane, priority: int) -> None:
        """Give a client a new entry in the heap, which makes an earlier entry invalid."""
        lane.priority = priority
        lane.entry = number = next(_numbers)
        heap = self._heap
        heappush(heap, (-priority, lane.client.turn, number, lane))
        if len(heap) > 8 + 2 * len(self._lanes):
            self._heap = [entry for entry in heap if entry[2] == entry[3].entry]
            heapify(self._heap)
