"""The calls that wait at the driver: their order, and the limits of the queue.

Waiting calls are sent by priority. Within one priority the clients with waiting calls take turns.
Within one client the oldest call is first.

One rule changes this order within a priority: a member (one worker) skips a call whose prefix
another member holds, and takes a later call instead. A skipped call may thus wait about twice as
long as without this rule. After that, any member takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Raw

from ..config import FabricConfig
from ..errors import Overloaded
from .calls import QUEUED, Call
from .clients import NO_LIMIT, ClientState
from .fair_queue import FairQueue
from .members import READY, STALE, Member
from .routing import Router

_PATIENCE: Final = 64
"""At least this many later calls may pass a call. ``_is_passed_enough`` computes the limit."""
_LOOKS: Final = 64
"""Maximum number of calls that one ``_take_for`` moves to the members that hold their prefixes."""


class CallQueue:
    """The waiting calls of one fabric.

    Invariants (checked by ``invariants.validate``):

    * A pinned call is in its member's ``pinned``. Any other call is in ``fresh``, or both in
      ``homed`` and in the ``returning`` of some member.
    * ``waiting``, the ``waiting`` of each client, and ``queued_bytes`` count the calls that are
      QUEUED and in ``Fabric.calls``.

    Args:
        members: the members of the fabric, by index.

    Attributes:
        fresh: calls that prefer no member.
        homed: calls that are in the ``returning`` of some member.
        waiting: number of waiting calls.
        queued_bytes: bytes of the waiting calls: prompts, raw arguments and raw frames. A prompt
            that several calls share counts once.
        clients: number of clients that have waiting calls.
    """

    def __init__(self, config: FabricConfig, router: Router, members: dict[int, Member]) -> None:
        self.router = router
        self.members = members
        self.fresh = FairQueue()
        self.homed = FairQueue()
        self.waiting = 0
        self.queued_bytes = 0
        self.clients = 0
        self._turns = 0
        self._own = self.add_client()
        self._max_calls = config.max_queue
        self._max_bytes = config.max_queue_bytes
        per_client = config.max_calls_per_client
        self._max_per_client = config.max_queue if per_client is None else per_client

    def add_client(self, max_unread: int = NO_LIMIT) -> ClientState:
        """Return a new client, which is served after all other clients.

        Args:
            max_unread: the client's waiting calls are sent only while the client has fewer than
                this many unread bytes of answers.
        """
        self._turns += 1
        return ClientState(self._turns, max_unread)

    def push(self, call: Call, *, limited: bool) -> None:
        """Add a call. A call without a client becomes a call of the pool's own client.

        Raises:
            Overloaded: the call is ``limited``, and would exceed a limit of the queue.
        """
        client = call.client
        if client is None:
            client = call.client = self._own
        size = own = _bytes_of(call)
        route = call.route
        if route is not None and not route.waiting:
            route.queued_bytes = len(route.tokens)
            size += route.queued_bytes
        if limited and (
            self.waiting >= self._max_calls
            or client.waiting >= self._max_per_client
            or self.queued_bytes + size > self._max_bytes
        ):
            raise self._overloaded(client, size)
        call.passed = 0
        call.queued_bytes = own
        if route is not None:
            route.waiting += 1
        self.waiting += 1
        self.queued_bytes += size
        if not client.waiting:
            self.clients += 1
        client.waiting += 1
        if call.pinned is not None:
            self.members[call.pinned].pinned.push(call)
            return
        home = self.router.home(call)
        if home is None:
            self.fresh.push(call)
        else:
            self._send_home(call, home)

    def _overloaded(self, client: ClientState, size: int) -> Overloaded:
        """Return the error for a call of ``size`` bytes that exceeds a limit."""
        if self.waiting >= self._max_calls:
            what = f"{self.waiting} calls already wait for a worker (max_queue={self._max_calls})"
        elif client.waiting >= self._max_per_client:
            what = (
                f"{client.waiting} calls of this client already wait for a worker "
                f"(max_calls_per_client={self._max_per_client})"
            )
        else:
            what = (
                f"this call has {size:,} bytes, and the {self.waiting} calls that already wait for "
                f"a worker have {self.queued_bytes:,}, of at most {self._max_bytes:,} "
                "(max_queue_bytes)"
            )
        return Overloaded(f"{what}; await some of them before you submit more")

    def _forget(self, call: Call) -> None:
        """Stop counting a call that has left the queue."""
        client, route = call.client, call.route
        assert client is not None
        size = call.queued_bytes
        if route is not None:
            route.waiting -= 1
            if not route.waiting:
                size += route.queued_bytes
        self.waiting -= 1
        self.queued_bytes -= size
        client.waiting -= 1
        if not client.waiting:
            self.clients -= 1

    def remove(self, call: Call) -> None:
        """Remove a call that is no longer QUEUED and that no member took.

        The call stays in its ``FairQueue`` until that queue reaches the call or is swept.
        """
        self._forget(call)
        client = call.client
        assert client is not None
        if not client.waiting:
            self.drop(client)
        elif call.pinned is not None:
            self.members[call.pinned].pinned.sweep(client)
        else:
            self.fresh.sweep(client)
            self.homed.sweep(client)

    def drop(self, client: ClientState) -> None:
        """Forget a client that has no waiting calls, or whose calls have all been cancelled."""
        self.fresh.drop(client)
        self.homed.drop(client)
        for member in self.members.values():
            member.returning.drop(client)
            member.pinned.drop(client)

    def withdraw(self, member: Member) -> None:
        """Let any member take the calls that preferred this member."""
        for call in member.returning:
            if call.state == QUEUED:
                self.fresh.push(call)
        member.returning.clear()

    def assign(self, member: Member | None) -> Iterator[tuple[Call, Member]]:
        """Take calls from the queue for members with room, until no call or no room is left.

        The caller must reserve a place at the member of each call before it takes the next call.

        Args:
            member: the member that gained room, if any. Calls that are pinned to it are taken
                first.
        """
        if member is not None:
            while member.has_room and (call := member.pinned.first()) is not None:
                member.pinned.take(call)
                self._take_turn(call)
                yield call, member
            while member.has_room and (call := self._take_for(member)) is not None:
                self.router.given(call, member)
                self._take_turn(call)
                yield call, member
        router = self.router
        while router.loads.with_room and (call := self._take_any()) is not None:
            chosen = router.choose(call)
            assert chosen is not None
            self._take_turn(call)
            yield call, chosen

    def describe(self, call: Call) -> str:
        """Return where a queued call waits, in words.

        The text includes the reason if the client does not read its answers, or if no worker that
        may take the call is ready.
        """
        client, pinned = call.client, call.pinned
        if client is not None and client.blocked:
            return f"in the queue: {client.unread:,} bytes of answers to its client are unread"
        among = self.members.values() if pinned is None else (self.members[pinned],)
        if any(member.state is READY for member in among):
            return "in the queue"
        states = Counter(member.state for member in among)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        if STALE in states:
            counts += ": until the next weight update"
        what = "no worker serves" if pinned is None else f"worker {pinned} does not serve"
        return f"in the queue: {what} ({counts or 'there is none'})"

    def _take_turn(self, call: Call) -> None:
        """Stop counting a call that has left the queue. Serve its client after all others."""
        self._forget(call)
        client = call.client
        assert client is not None
        self._turns += 1
        client.turn = self._turns

    def _take_any(self) -> Call | None:
        """Take the next call that is not pinned, for any member."""
        fresh = self.fresh.first()
        call = _earlier(fresh, self.homed.first())
        if call is not None:
            (self.fresh if call is fresh else self.homed).take(call)
        return call

    def _take_for(self, member: Member) -> Call | None:
        """Take the next call that is not pinned, for this member, which has room."""
        own = member.returning.first()
        fresh = self.fresh.first()
        for _ in range(_LOOKS):
            if fresh is None or fresh is not _earlier(fresh, own):
                break
            # A member may have received the prefix of this call after the call was queued.
            home = self.router.home(fresh)
            if home is None or home is member:
                break
            self.fresh.take(fresh)
            self._send_home(fresh, home)
            fresh = self.fresh.first()
        next_ = _earlier(fresh, self.homed.first())
        if next_ is None:
            return None
        call = _earlier(fresh, own)
        if call is None or call.priority != next_.priority or self._is_passed_enough(next_):
            call = next_
        elif call is not next_:
            next_.passed += 1
        if call is fresh:
            self.fresh.take(call)
        elif call is own:
            member.returning.take(call)
        else:
            self.homed.take(call)
        return call

    def _is_passed_enough(self, call: Call) -> bool:
        """Return True if later calls have passed this call as often as is allowed.

        The limit grows with the number of calls that may go before this call when clients take
        turns: at most the waiting calls of its client times the number of clients.
        """
        client = call.client
        assert client is not None
        return call.passed >= _PATIENCE + 2 * min(self.waiting, client.waiting * self.clients)

    def _send_home(self, call: Call, home: Member) -> None:
        """Queue the call for the member that holds its prefix."""
        self.homed.push(call)
        home.returning.push(call)


def _bytes_of(call: Call) -> int:
    """Return the number of bytes of a call without its prompt."""
    size = call.extra_bytes
    args = call.args
    if isinstance(args, Raw):
        size += len(args)
    for frame in call.frames:
        size += len(frame)
    return size


def _earlier(a: Call | None, b: Call | None) -> Call | None:
    if a is None or b is None:
        return a or b
    return b if b.goes_before(a) else a
