"""Check the invariants of a ``Fabric``, which its module lists."""

from __future__ import annotations

from collections import Counter

from .calls import CANCELLING, QUEUED, RUNNING, SENT
from .clients import ClientState
from .fabric import Fabric
from .members import GONE, READY


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
    fabric.queue.validate(fabric.calls)
    ready = [m for m in fabric.members.values() if m.state is READY]
    assert fabric.loads.members == len(ready)
    assert fabric.loads.total == sum(m.load for m in ready)
    assert fabric.loads.with_room == sum(m.has_room for m in ready)
    if fabric.loads.with_room:
        least = fabric.loads.least()
        assert least is not None
        assert least.load == min(m.load for m in ready if m.has_room)
