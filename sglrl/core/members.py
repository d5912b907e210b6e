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

Entry = tuple[int, int, int, Call]
"""In a heap of waiting calls: by priority and age. The third is another one for each, as a call may
stand in a heap twice. Entries of calls that are no longer QUEUED are passed over."""


class Member:
    """One worker: its state, its window, and the calls it holds by id."""

    __slots__ = (
        "alone",
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
        self.alone = (self,)
        self.state = STARTING
        self.window = 0
        self.load = 0
        self.served = 0
        self.kv_usage = -1.0
        self.waiting = self.preempted = 0
        self.calls: dict[int, Call] = {}
        self.pinned: list[Entry] = []
        """Calls that wait for this member and no other, a heap."""
        self.returning: list[Entry] = []
        """Calls that wait for any member and had best go to this one, which holds what they go on
        from; and some that wait no longer. A heap."""

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
    """Members with room, by load: who has the least is known in O(1), also with 1,000 members.

    ``buckets[n]`` holds, in order of arrival, the members with room that hold n calls. Taking
    from the front and appending to the next bucket makes equally loaded members take turns.
    """

    def __init__(self) -> None:
        self.buckets: list[dict[Member, None]] = [{}]
        self.lowest = 0
        self.with_room = 0
        self.members = 0
        self.total = 0

    def join(self, member: Member) -> None:
        """A member became READY with its window set."""
        self.members += 1
        self.total += member.load
        if member.load < member.window:
            self._insert(member)

    def leave(self, member: Member) -> None:
        """A READY member stops taking calls."""
        self.members -= 1
        self.total -= member.load
        if member.load < member.window:
            self._remove(member)

    def reserve(self, member: Member) -> None:
        """One more call for a READY member; beyond its window, if the call is urgent."""
        load, window = member.load, member.window
        member.load = more = load + 1
        self.total += 1
        if load >= window:
            return
        buckets = self.buckets
        bucket = buckets[load]
        del bucket[member]
        if more < window:
            if more == len(buckets):
                buckets.append({})
            buckets[more][member] = None
            if not bucket and self.lowest == load:
                self.lowest = more
            return
        self.with_room -= 1
        if self.with_room:
            lowest = self.lowest
            while not buckets[lowest]:
                lowest += 1
            self.lowest = lowest

    def release(self, member: Member, count: int = 1) -> None:
        """``count`` calls less for a READY member."""
        load = member.load
        member.load = less = load - count
        self.total -= count
        if load < member.window:
            buckets = self.buckets
            del buckets[load][member]
            buckets[less][member] = None
            if less < self.lowest or self.with_room == 1:
                self.lowest = less
        elif less < member.window:
            self._insert(member)

    def least(self) -> Member | None:
        """The member with room that holds the fewest calls."""
        if not self.with_room:
            return None
        return next(iter(self.buckets[self.lowest]))

    def _insert(self, member: Member) -> None:
        load = member.load
        while load >= len(self.buckets):
            self.buckets.append({})
        if not self.with_room or load < self.lowest:
            self.lowest = load
        self.buckets[load][member] = None
        self.with_room += 1

    def _remove(self, member: Member) -> None:
        del self.buckets[member.load][member]
        self.with_room -= 1
        if self.with_room:
            while not self.buckets[self.lowest]:
                self.lowest += 1
