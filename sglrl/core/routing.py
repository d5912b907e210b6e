"""Which worker gets a call: a chain of strategies, each of which names a member or passes.

* ``prefix-aware``: the member that holds the longest cached prefix of the prompt, per weight
  version; among equals the least loaded; passes when that member is overloaded.
* ``requests``: the member with the fewest calls.
* ``kv-cache``: the member with the lowest KV-cache usage, as its engine reports it.
* ``round-robin``: members in turn.

Session affinity comes before the chain: the turns of one session go to the worker of the turn
before, unless it is overloaded. Samples of one prompt share a worker because they share a prefix.
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
    """Chooses among the members of a ``LoadIndex``; remembers prefixes, sessions and the turn."""

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
        """A member with room for the call, or None when nobody has room."""
        loads = self.loads
        if not loads.with_room:
            return None
        if loads.members == 1:
            return self.ready[0]
        route = call.route
        member: Member | None = None
        if loads.with_room == 1:
            # There is nothing to choose.
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
        """The member gets the call: those that go on from it belong there."""
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
        """The one member that holds what this call goes on from, if there is one: who got the call
        before of its conversation or session, or who alone holds its longest known prefix."""
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
        """Whether affinity should give way: no room, or far more calls than the mean."""
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
        """Who got the call before of this conversation, or of this session, if it serves."""
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
            # Who has the least is looked for where it matters.
            return only if not self.overloaded(only) or only is self.loads.least() else None
        least = self.loads.least()
        assert least is not None
        if least in holders:
            return least
        best: Member | None = None
        # Bounded: a prefix that very many workers hold is no reason to look at all of them. The
        # first have not got it for longest, so they are the likeliest to have room.
        for member in islice(holders, _HOLDERS):
            if member.load < member.window and (best is None or member.load < best.load):
                best = member
                if best.load == least.load:
                    # None can be lower.
                    break
        return None if best is None or self.overloaded(best) else best

    def _by_requests(self, call: Call) -> Member | None:
        return self.loads.least()

    def _by_kv_usage(self, call: Call) -> Member | None:
        if all(m.kv_usage < 0 for m in self.ready):
            return None
        # Who has not said yet how full it is has just come.
        with_room = [m for m in self.ready if m.has_room]
        return min(with_room, key=lambda m: (round(max(m.kv_usage, 0), 2), m.load), default=None)

    def _in_turn(self, call: Call) -> Member | None:
        for _ in range(len(self.ready)):
            self.turn = (self.turn + 1) % len(self.ready)
            if self.ready[self.turn].has_room:
                return self.ready[self.turn]
        return None
