"""Choose the worker for a call with a chain of strategies. Each strategy names a member or passes.

* ``prefix-aware``: the member that holds the longest cached prefix of the prompt, per weight
  version. Among equals it names the least loaded member. It passes if that member is overloaded.
* ``requests``: the member with the fewest calls.
* ``kv-cache``: the member with the lowest KV-cache usage that its engine reported.
* ``round-robin``: the members in turn.

Session affinity is applied before the chain: a turn of a session goes to the worker of the previous
turn, unless that worker is overloaded. Samples of one prompt share a worker because they share a
prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final, cast

from ..config import FabricConfig
from .calls import Call
from .members import READY, LoadIndex, Member
from .prefixes import PrefixIndex, Route

_HOLDERS: Final = 8
"""Maximum prefix holders considered."""


class Router:
    """Chooses among the members of a ``LoadIndex``. Stores the members of prefixes and sessions."""

    def __init__(self, config: FabricConfig, loads: LoadIndex) -> None:
        self.config = config
        self.loads = loads
        self.prefixes: PrefixIndex[Member] = PrefixIndex(config.prefix_entries)
        self.sessions: OrderedDict[str, Member] = OrderedDict()
        self.ready: list[Member] = []
        self.turn = 0
        by_name: dict[str, Callable[[Call], Member | None]] = {
            "prefix-aware": self._by_prefix,
            "requests": self._by_requests,
            "kv-cache": self._by_kv_usage,
            "round-robin": self._in_turn,
        }
        self.chain = [by_name[name] for name in config.routing]
        self.tracks_prefixes = "prefix-aware" in config.routing

    def join(self, member: Member) -> None:
        self.ready.append(member)

    def leave(self, member: Member) -> None:
        self.ready.remove(member)
        self.prefixes.forget(member)
        for session in [s for s, m in self.sessions.items() if m is member]:
            del self.sessions[session]

    def choose(self, call: Call) -> Member | None:
        """Return a member with room for the call, or None if no member has room."""
        loads = self.loads
        if not loads.with_room:
            return None
        if loads.members == 1:
            return self.ready[0]
        route = call.route
        member: Member | None = None
        if loads.with_room == 1:
            # Only one member can take the call.
            member = loads.least()
        elif route is not None and (route.sticky or route.session is not None):
            member = self._latest(route)
            if member is not None and self.overloaded(member):
                member = None
        if member is None:
            for strategy in self.chain:
                member = strategy(call)
                if member is not None:
                    break
            else:
                member = loads.least()
        if member is not None:
            self.given(call, member)
        return member

    def given(self, call: Call, member: Member) -> None:
        """Record that the member gets the call. Calls that continue the call prefer this member."""
        route = call.route
        if route is None or self.loads.members <= 1:
            return
        if self.tracks_prefixes:
            route.record(self.prefixes, member, self.config.prefix_block)
        else:
            route.member = member
        if route.session is not None:
            self._remember(route.session, member)

    def home(self, call: Call) -> Member | None:
        """Return the one member that holds the prefix of this call, if there is exactly one.

        This is the member that got the previous call of the conversation or session. Without one,
        it is the only member that holds the longest known prefix.
        """
        route = call.route
        if route is None or self.loads.members <= 1:
            return None
        member = self._latest(route)
        if member is None and self.tracks_prefixes:
            holders = self.prefixes.holders(route.prefix_keys(self.config.prefix_block))
            if len(holders) == 1:
                (member,) = holders
        return member

    def overloaded(self, member: Member) -> bool:
        """Return True if the member has no room or far more calls than the mean.

        Affinity does not apply to an overloaded member.
        """
        load = member.load
        if not load:
            return False
        loads = self.loads
        return (
            load * loads.members
            > self.config.overload * loads.total + self.config.overload_slack * loads.members
            or load >= member.window
        )

    def _remember(self, session: str, member: Member) -> None:
        sessions = self.sessions
        sessions[session] = member
        sessions.move_to_end(session)
        if len(sessions) > self.config.prefix_entries:
            sessions.popitem(last=False)

    def _latest(self, route: Route) -> Member | None:
        """Return the READY member that got the previous call of this conversation or session."""
        name = route.session
        if name is not None:
            member = self.sessions.get(name)
        else:
            member = cast("Member | None", route.member) if route.sticky else None
        return member if member is not None and member.state is READY else None

    def _by_prefix(self, call: Call) -> Member | None:
        if call.route is None:
            return None
        holders = self.prefixes.holders(call.route.prefix_keys(self.config.prefix_block))
        if not holders:
            return None
        if len(holders) == 1:
            (only,) = holders
            # Find the least loaded member only if the answer matters.
            return only if not self.overloaded(only) or only is self.loads.least() else None
        least = self.loads.least()
        assert least is not None
        if least in holders:
            return least
        best: Member | None = None
        # Very many workers may hold a prefix, so consider only a few. The first holders in the
        # order of the index got the prefix the longest time ago, so they most likely have room.
        for member in islice(holders, _HOLDERS):
            if member.load < member.window and (best is None or member.load < best.load):
                best = member
                if best.load == least.load:
                    # No member has a lower load.
                    break
        return None if best is None or self.overloaded(best) else best

    def _by_requests(self, call: Call) -> Member | None:
        return self.loads.least()

    def _by_kv_usage(self, call: Call) -> Member | None:
        if all(m.reported.kv_usage < 0 for m in self.ready):
            return None
        # A member that has not reported its usage has just started: its usage counts as 0.
        with_room = [m for m in self.ready if m.has_room]
        usage = {m: round(max(m.reported.kv_usage, 0), 2) for m in with_room}
        return min(with_room, key=lambda m: (usage[m], m.load), default=None)

    def _in_turn(self, call: Call) -> Member | None:
        for _ in range(len(self.ready)):
            self.turn = (self.turn + 1) % len(self.ready)
            if self.ready[self.turn].has_room:
                return self.ready[self.turn]
        return None
