"""The life of one worker as the driver sees it, and who has room for the next call.

::

    STARTING ──▶ READY ──▶ DRAINING ──▶ RETIRED
       │ ╲       ▲   ╲        │           ▲
       │  ▶ SYNCING ◀─▶ STALE │           │
       ▼        ▼        ▼    ▼           │
      LOST (a replacement is to come) ────┘

SYNCING: it is up and gets the current weights. STALE: nobody could give them to it, so it waits for
the next update. A replacement is a new member of the same index. A member's ``load`` is the number
of calls it holds; it is reserved when a call is sent and released when the call ends there or the
worker is lost, so nothing can strand it.
"""

from __future__ import annotations

from typing import Final

from ..errors import SglrlError
from .calls import Call
from .fair_queue import FairQueue

STARTING: Final = "starting"
SYNCING: Final = "syncing"
STALE: Final = "stale"
READY: Final = "ready"
DRAINING: Final = "draining"
LOST: Final = "lost"
RETIRED: Final = "retired"

LEGAL: Final[dict[str, tuple[str, ...]]] = {
    STARTING: (SYNCING, READY, LOST, RETIRED),
    SYNCING: (STALE, READY, LOST, RETIRED),
    STALE: (SYNCING, READY, LOST, RETIRED),
    READY: (DRAINING, LOST, RETIRED),
    DRAINING: (LOST, RETIRED),
    LOST: (RETIRED,),
    RETIRED: (),
}
GONE: Final = (LOST, RETIRED)


class Member:
    """One worker: its state, its window, and the calls it holds by id."""

    __slots__ = (
        "alone",
        "bucket",
        "calls",
        "index",
        "kv_usage",
        "load",
        "pinned",
        "preempted",
        "returning",
        "served",
        "state",
        "waiting",
        "window",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.alone: tuple[Member, ...] = (self,)
        """In a ``PrefixIndex``, where it is known by its identity."""
        self.state = STARTING
        self.window = 0
        self.load = 0
        self.bucket = -1
        """Of the ``LoadIndex``, in which it is; -1: in none."""
        self.served = 0
        self.kv_usage = -1.0
        self.waiting = self.preempted = 0
        self.calls: dict[int, Call] = {}
        self.pinned = FairQueue()
        """Calls that wait for this member and no other."""
        self.returning = FairQueue()
        """Calls that wait for any member and had best go to this one, which holds what they go on
        from."""

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
    """READY members by load: who of those with room has the least is known in O(1), also with 1,000
    members.

    ``buckets[n]`` holds members with room that hold n calls, in the order in which they came to.
    Taking from the front makes equally loaded members take turns. Members whose load has changed
    change their bucket when somebody asks who has the least, which not every call does.
    """

    def __init__(self) -> None:
        self.buckets: list[dict[Member, None]] = []
        self.lowest = 0
        """No bucket below holds a member."""
        self.changed: dict[Member, None] = {}
        self.with_room = 0
        self.members = 0
        self.total = 0

    def join(self, member: Member) -> None:
        """A member became READY with its window set."""
        self.members += 1
        self.total += member.load
        if member.load < member.window:
            self.with_room += 1
        self.changed[member] = None

    def leave(self, member: Member) -> None:
        """A READY member stops taking calls."""
        self.members -= 1
        self.total -= member.load
        if member.load < member.window:
            self.with_room -= 1
        self.changed.pop(member, None)
        if member.bucket >= 0:
            del self.buckets[member.bucket][member]
            member.bucket = -1

    def reserve(self, member: Member) -> None:
        """One more call for a READY member; beyond its window, if the call is urgent."""
        member.load = load = member.load + 1
        self.total += 1
        if load == member.window:
            self.with_room -= 1
        self.changed[member] = None

    def release(self, member: Member, count: int = 1) -> None:
        """``count`` calls less for a READY member."""
        before = member.load
        member.load = load = before - count
        self.total -= count
        if load < member.window <= before:
            self.with_room += 1
        self.changed[member] = None

    def least(self) -> Member | None:
        """The member with room that holds the fewest calls."""
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
