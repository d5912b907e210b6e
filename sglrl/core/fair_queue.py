"""Calls that wait, in the order in which they are served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Final

from .calls import QUEUED, Call
from .clients import ClientState

_SPARE: Final = 64
"""Calls of a client that may stand in a queue, beyond twice those that wait."""

Entry = tuple[int, int, int, Call]
_numbers: Final = count()


class Waiting:
    """One client's queue by priority and age. A call may stand in it twice; one that is no longer
    QUEUED is passed over.

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
        if len(self.line) + len(self.late) > most:
            self.line = deque([call for call in self.line if call.state == QUEUED])
            self.late = [entry for entry in self.late if entry[3].state == QUEUED]
            heapify(self.late)

    def clear(self) -> None:
        self.line.clear()
        self.late.clear()


class _Lane(Waiting):
    """One client's calls in a ``FairQueue``.

    ``entry``: number of the one entry in the queue's heap that counts for it; -1: there is none.
    ``priority``: what that entry says.
    """

    __slots__ = ("client", "entry", "priority")

    def __init__(self, client: ClientState) -> None:
        super().__init__()
        self.client = client
        self.entry = -1
        self.priority = 0


Turn = tuple[int, int, int, _Lane]


class FairQueue:
    """A queue of several clients' calls, in the order of ``Call.goes_before``: by priority, then
    clients take turns, and within one client by age. A call may stand in it twice. One that is no
    longer QUEUED is passed over, and so are all calls of a client that is ``blocked``.

    A heap finds the client that goes next. Its entries may lag behind: a client that was served
    since, here or in another queue, goes later than its entry says. ``first`` corrects the entries
    that it comes to. So a call costs O(log clients).
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
            # Its calls may have been passed over, and others may go before this one.
            self.rejoin(client)
        elif call.priority > lane.priority:
            self._enter(lane, call.priority)

    def first(self) -> Call | None:
        """The call that is served next."""
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
                # With one client there is nothing to correct.
                return call
            else:
                lane.priority = call.priority
                lane.entry = number = next(_numbers)
                heapreplace(heap, (-call.priority, client.turn, number, lane))
        return None

    def take(self, call: Call) -> None:
        """Take out the call that is ``first``."""
        assert call.client is not None
        self._lanes[call.client].take()

    def rejoin(self, client: ClientState) -> None:
        """No entry counts for the client, whose calls are to be found again."""
        lane = self._lanes.get(client)
        if lane is not None and lane.entry < 0:
            call = lane.first()
            if call is None:
                del self._lanes[client]
            else:
                self._enter(lane, call.priority)

    def sweep(self, client: ClientState) -> None:
        """Some of the client's calls wait no longer. Let go of these if more than twice the calls
        that wait stand here."""
        lane = self._lanes.get(client)
        if lane is not None:
            lane.bound(_SPARE + 2 * client.waiting)

    def drop(self, client: ClientState) -> None:
        """The client has no calls that wait."""
        lane = self._lanes.pop(client, None)
        if lane is not None:
            lane.entry = -1

    def clear(self) -> None:
        for lane in self._lanes.values():
            lane.entry = -1
        self._lanes.clear()
        self._heap.clear()

    def _enter(self, lane: _Lane, priority: int) -> None:
        """Its entry from now on."""
        lane.priority = priority
        lane.entry = number = next(_numbers)
        heap = self._heap
        heappush(heap, (-priority, lane.client.turn, number, lane))
        if len(heap) > 8 + 2 * len(self._lanes):
            self._heap = [entry for entry in heap if entry[2] == entry[3].entry]
            heapify(self._heap)
