"""The life of one worker as the driver sees it, and an index of the workers that have room.

::

    STARTING ──▶ READY ──▶ DRAINING ──▶ RETIRED
       │ ╲       ▲   ╲        │           ▲
       │  ▶ SYNCING ◀─▶ STALE │           │
       ▼        ▼        ▼    ▼           │
      LOST (a replacement follows) ───────┘

* SYNCING: the worker has started and receives the current weights.
* STALE: no peer could send the current weights to the worker. The worker waits for the next update.
* AWAY (from READY, SYNCING and STALE): the connection to the worker is broken, and the worker may
  return. It holds no calls. It becomes SYNCING, READY or LOST.

A replacement is a new member with the same index. A worker that returns is the same member.

A member's ``load`` is the number of calls that it holds. Sending a call reserves a place in the
window. The place is released when the call ends on the worker or when the worker is lost, so no
reservation can leak.
"""

from __future__ import annotations

from typing import Final

from ..errors import SglrlError
from ..wire.calls import Load
from .calls import Call
from .fair_queue import FairQueue

STARTING: Final = "starting"
SYNCING: Final = "syncing"
STALE: Final = "stale"
AWAY: Final = "away"
READY: Final = "ready"
DRAINING: Final = "draining"
LOST: Final = "lost"
RETIRED: Final = "retired"

LEGAL: Final[dict[str, tuple[str, ...]]] = {
    STARTING: (SYNCING, READY, LOST, RETIRED),
    SYNCING: (STALE, READY, AWAY, LOST, RETIRED),
    STALE: (SYNCING, READY, AWAY, LOST, RETIRED),
    READY: (DRAINING, AWAY, LOST, RETIRED),
    AWAY: (SYNCING, READY, LOST, RETIRED),
    DRAINING: (LOST, RETIRED),
    LOST: (RETIRED,),
    RETIRED: (),
}
GONE: Final = (LOST, RETIRED)


class Member:
    """One worker: its state, its window, and the calls that it holds, by id."""

    __slots__ = (
        "alone",
        "bucket",
        "calls",
        "index",
        "load",
        "pinned",
        "reported",
        "returning",
        "served",
        "state",
        "window",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.alone: tuple[Member, ...] = (self,)
        """A tuple of this member alone. In a ``PrefixIndex``, it is the entry of each prefix that
        only this member holds. The index compares this tuple by identity."""
        self.state = STARTING
        self.window = 0
        self.load = 0
        self.bucket = -1
        """The member's bucket in the ``LoadIndex``; -1 if it is in no bucket."""
        self.served = 0
        self.reported = Load()
        """The last load that the worker's engine reported."""
        self.calls: dict[int, Call] = {}
        self.pinned = FairQueue()
        """Calls that only this member may take."""
        self.returning = FairQueue()
        """Waiting calls that any member may take. They prefer this member because it holds their
        prefix."""

    @property
    def has_room(self) -> bool:
        return self.state is READY and self.load < self.window

    def move(self, state: str) -> None:
        if state not in LEGAL[self.state]:
            raise SglrlError(f"{self!r}: {self.state} -> {state} is not legal")
        self.state = state

    def __repr__(self) -> str:
        return f"<Member {self.index} {self.state} load={self.load}/{self.window}>"


class LoadIndex:
    """The READY members by load. ``least`` finds the least loaded member with room in O(1).

    ``buckets[n]`` contains the members with room that hold n calls, in the order in which they
    reached that load. ``least`` takes from the front, so equally loaded members take turns. Only
    ``least`` moves members whose load has changed to their new buckets, because many calls are sent
    without ``least``.
    """

    def __init__(self) -> None:
        self.buckets: list[dict[Member, None]] = []
        self.lowest = 0
        """All buckets below this one are empty."""
        self.changed: dict[Member, None] = {}
        self.with_room = 0
        self.members = 0
        self.total = 0

    def join(self, member: Member) -> None:
        """Add a member that became READY. Its window must already be set."""
        self.members += 1
        self.total += member.load
        if member.load < member.window:
            self.with_room += 1
        self.changed[member] = None

    def leave(self, member: Member) -> None:
        """Remove a READY member that stops accepting calls."""
        self.members -= 1
        self.total -= member.load
        if member.load < member.window:
            self.with_room -= 1
        self.changed.pop(member, None)
        if member.bucket >= 0:
            del self.buckets[member.bucket][member]
            member.bucket = -1

    def reserve(self, member: Member) -> None:
        """Count one more call of a READY member. An urgent call may exceed the window."""
        member.load = load = member.load + 1
        self.total += 1
        if load == member.window:
            self.with_room -= 1
        self.changed[member] = None

    def release(self, member: Member, count: int = 1) -> None:
        """Count ``count`` fewer calls of a READY member."""
        before = member.load
        member.load = load = before - count
        self.total -= count
        if load < member.window <= before:
            self.with_room += 1
        self.changed[member] = None

    def least(self) -> Member | None:
        """Return the member with room that holds the fewest calls, if any."""
        if not self.with_room:
            return None
        buckets, lowest = self.buckets, self.lowest
        for member in self.changed:
            if member.bucket >= 0:
                del buckets[member.bucket][member]
            load = member.load
            if load >= member.window:
                member.bucket = -1
                continue
            member.bucket = load
            while load >= len(buckets):
                buckets.append({})
            buckets[load][member] = None
            if load < lowest:
                lowest = load
        self.changed.clear()
        while not buckets[lowest]:
            lowest += 1
        self.lowest = lowest
        return next(iter(buckets[lowest]))
