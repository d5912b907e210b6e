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
"""A queue keeps at most ``_SPARE + 2 * client.waiting`` calls of each client. Calls that no longer
wait count, too."""

Entry = tuple[int, int, int, Call]
_numbers: Final = count()


class Waiting:
    """The calls of one client, by priority and age.

    A call may be in the queue twice. Calls that are no longer QUEUED are skipped, but ``len``
    counts them.

    Attributes:
        line: calls that are served in the order in which they arrived. Nearly all calls are here,
            so ``push`` and ``first`` mostly cost O(1).
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
        entry: the serial number of the client's valid entry in ``FairQueue._heap``. -1: the client
            has no valid entry.
        priority: the priority in the valid entry.
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
    all calls of a client with too many unread bytes (``ClientState.blocked``).

    A heap finds the next client. Its entries store the clients' turns. An entry is outdated if this
    or another queue has served the client since the entry was made, because the client's turn is
    now later. ``first`` corrects only outdated entries at the top of the heap. Each correction
    costs O(log clients).
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
            # Do not use the priority of this call. A client that was blocked may have other calls
            # in its lane, and one of them may be served earlier.
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
        """Remove a client's calls that no longer wait, if it has more calls here than allowed.

        ``_SPARE`` defines the allowed number.
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
