"""The calls that wait at the driver: their order, and the limits of the queue.

Waiting calls are sent by priority. Within one priority the clients with waiting calls take turns.
Within one client the oldest call is first.

One rule changes this order within a priority: a member skips a call whose prefix another member
holds, and takes a later call instead. A skipped call may thus wait about twice as long as without
this rule. After that, any member takes it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Raw

from ..config import FabricConfig
from ..errors import Overloaded
from .calls import QUEUED, Call
from .clients import ClientState
from .fair_queue import FairQueue
from .members import Member
from .routing import Router

_PATIENCE: Final = 64
"""Number of times that a call may be passed, in addition to a share for each waiting call."""
_LOOKS: Final = 64
"""Maximum number of calls that one dispatch moves to the member that holds their prefix."""


class CallQueue:
    """The waiting calls of one fabric.

    Invariants (checked by ``validate``):

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
        self._max_calls = config.max_queue
        self._max_bytes = config.max_queue_bytes
        most = config.max_calls_per_client
        self._max_per_client = config.max_queue if most is None else most

    def push(self, call: Call, *, limited: bool = True) -> None:
        """Add a call, which must have a client.

        Raises:
            Overloaded: the call is ``limited``, and would exceed a limit of the queue.
        """
        client = call.client
        assert client is not None
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

    def leave(self, call: Call) -> None:
        """Stop counting a call that has been taken out."""
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

        The call stays in its ``FairQueue`` until the queue reaches it or is swept.
        """
        self.leave(call)
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
        """Forget a client that has no waiting calls."""
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

    def take_pinned(self, member: Member) -> Call | None:
        """Take the next call that is pinned to this member, which has room."""
        call = member.pinned.first()
        if call is not None:
            member.pinned.take(call)
        return call

    def take_any(self) -> Call | None:
        """Take the next call that is not pinned, for any member."""
        fresh = self.fresh.first()
        call = _earlier(fresh, self.homed.first())
        if call is not None:
            (self.fresh if call is fresh else self.homed).take(call)
        return call

    def take_for(self, member: Member) -> Call | None:
        """Take the next call that is not pinned, for this member, which has room."""
        own = member.returning.first()
        fresh = self.fresh.first()
        for _ in range(_LOOKS):
            if fresh is None or fresh is not _earlier(fresh, own):
                break
            # Since the call was queued, a member may have received its prefix.
            home = self.router.home(fresh)
            if home is None or home is member:
                break
            self.fresh.take(fresh)
            self._send_home(fresh, home)
            fresh = self.fresh.first()
        next_ = _earlier(fresh, self.homed.first())
        if next_ is None:
            return None
        found = _earlier(fresh, own)
        if found is None or found.priority != next_.priority or self._is_passed_enough(next_):
            found = next_
        elif found is not next_:
            next_.passed += 1
        if found is fresh:
            self.fresh.take(found)
        elif found is own:
            member.returning.take(found)
        else:
            self.homed.take(found)
        return found

    def _is_passed_enough(self, call: Call) -> bool:
        """Return True if the call has been passed as often as is allowed.

        The limit is proportional to the wait of a call in a fair order. There, a client that comes
        last waits for one call of each client per call of its own.
        """
        client = call.client
        assert client is not None
        return call.passed >= _PATIENCE + 2 * min(self.waiting, client.waiting * self.clients)

    def _send_home(self, call: Call, home: Member) -> None:
        """Queue the call for the member that holds its prefix."""
        self.homed.push(call)
        home.returning.push(call)

    def validate(self, calls: dict[int, Call]) -> None:
        """Check the invariants in O(n).

        Args:
            calls: all calls that have not ended.

        Raises:
            AssertionError: an invariant is broken.
        """
        waiting = [call for call in calls.values() if call.state == QUEUED]
        assert self.waiting == len(waiting), (self.waiting, len(waiting))
        fresh, homed = set(self.fresh), set(self.homed)
        returning = {call for member in self.members.values() for call in member.returning}
        of_client: dict[ClientState, int] = {}
        of_route: dict[object, int] = {}
        for call in waiting:
            client, route = call.client, call.route
            assert client is not None, call
            of_client[client] = of_client.get(client, 0) + 1
            if route is not None:
                of_route[route] = of_route.get(route, 0) + 1
                assert route.waiting >= of_route[route], call
            if call.pinned is not None:
                assert call in set(self.members[call.pinned].pinned), call
            else:
                assert call in fresh or (call in homed and call in returning), call
        assert self.clients == len(of_client), (self.clients, of_client)
        for client, count in of_client.items():
            assert client.waiting == count, (client, count)
        assert len({client.turn for client in of_client}) == len(of_client), of_client
        routes = {call.route for call in waiting if call.route is not None}
        size = sum(call.queued_bytes for call in waiting) + sum(r.queued_bytes for r in routes)
        assert self.queued_bytes == size, (self.queued_bytes, size)


def _bytes_of(call: Call) -> int:
    """Return the bytes of a call without its prompt."""
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
