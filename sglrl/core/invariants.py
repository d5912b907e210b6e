"""Check the invariants that the docstrings of ``fabric.py`` and ``CallQueue`` list."""

from __future__ import annotations

from collections import Counter

from .calls import CANCELLING, QUEUED, RUNNING, SENT
from .clients import ClientState
from .fabric import Fabric
from .members import GONE, READY
from .prefixes import Route


def validate(fabric: Fabric) -> None:
    """Raise ``AssertionError`` unless every invariant holds. O(calls + workers)."""
    held = 0
    expected: Counter[ClientState] = Counter()
    for member in fabric.members.values():
        assert member.load == len(member.calls), member
        load = member.load - sum(call.urgent for call in member.calls.values())
        assert member.state in GONE or load <= member.window or not member.window, member
        for call in member.calls.values():
            assert call.state in (SENT, RUNNING, CANCELLING), call
            assert call.worker is member, call
            if call.client is not None:
                expected[call.client] += call.answer_bytes
        held += len(member.calls)
    for call in fabric.calls.values():
        assert call.state in (QUEUED, SENT, RUNNING), call
        if call.state == QUEUED and not (call.client is not None and call.client.blocked):
            if call.pinned is None:
                assert not fabric.loads.with_room, call
            else:
                assert not fabric.members[call.pinned].has_room, call
    assert all(client.unread >= size for client, size in expected.items()), expected
    _validate_queue(fabric)
    ready = [m for m in fabric.members.values() if m.state is READY]
    assert fabric.loads.members == len(ready)
    assert fabric.loads.total == sum(m.load for m in ready)
    assert fabric.loads.with_room == sum(m.has_room for m in ready)
    if fabric.loads.with_room:
        least = fabric.loads.least()
        assert least is not None
        assert least.load == min(m.load for m in ready if m.has_room)


def _validate_queue(fabric: Fabric) -> None:
    queue = fabric.queue
    waiting = [call for call in fabric.calls.values() if call.state == QUEUED]
    assert queue.waiting == len(waiting), (queue.waiting, len(waiting))
    fresh, homed = set(queue.fresh), set(queue.homed)
    returning = {call for member in fabric.members.values() for call in member.returning}
    of_client: Counter[ClientState] = Counter()
    of_route: Counter[Route] = Counter()
    for call in waiting:
        client, route = call.client, call.route
        assert client is not None, call
        of_client[client] += 1
        if route is not None:
            of_route[route] += 1
        if call.pinned is not None:
            assert call in set(fabric.members[call.pinned].pinned), call
        else:
            assert call in fresh or (call in homed and call in returning), call
    assert queue.clients == len(of_client), (queue.clients, of_client)
    for client, count in of_client.items():
        assert client.waiting == count, (client, count)
    for route, count in of_route.items():
        assert route.waiting >= count, (route, count)
    assert len({client.turn for client in of_client}) == len(of_client), of_client
    size = sum(call.queued_bytes for call in waiting) + sum(r.queued_bytes for r in of_route)
    assert queue.queued_bytes == size, (queue.queued_bytes, size)
