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

from collections.abc import Callable
from itertools import islice
from typing import Final

from ..config import FabricConfig
from .calls import Call
from .members import LoadIndex, Member

_HOLDERS: Final = 32


class Route:
    """What routing may know of a call; shared by the n samples of one prompt.

    ``tokens``: the prompt as int32 bytes. ``version``: policy version; KV of different versions
    is never shared, so neither are prefixes.
    """

    __slots__ = ("keys", "session", "tokens", "version")

    def __init__(self, tokens: bytes, version: int = 0, session: str | None = None) -> None:
        self.tokens = tokens
        self.version = version
        self.session = session
        self.keys: list[int] | None = None

    def prefix_keys(self, block: int) -> list[int]:
        """One key per full block of ``block`` tokens, each depending on all tokens before it,
        then one for the whole prompt. A collision costs a cache miss, never a wrong result."""
        keys = self.keys
        if keys is None:
            tokens, step = self.tokens, block * 4
            key = hash(("sglrl", self.version))
            keys = []
            for end in range(step, len(tokens) + 1, step):
                key = hash((key, tokens[end - step : end]))
                keys.append(key)
            if len(tokens) % step:
                keys.append(hash((key, tokens[len(tokens) - len(tokens) % step :])))
            self.keys = keys
        return keys


class PrefixIndex:
    """Which members have seen which prompt prefix: bounded, approximately least recently used.

    Two generations: entries are read from both and written to the younger; when it holds half of
    ``entries`` the older one is dropped. So an entry is forgotten only after at least
    ``entries / 2`` others were used since its last use.
    """

    def __init__(self, entries: int) -> None:
        self.half = max(1, entries // 2)
        self.young: dict[int, dict[Member, None]] = {}
        self.old: dict[int, dict[Member, None]] = {}

    def holders(self, keys: list[int]) -> dict[Member, None]:
        """The members known to hold the longest prefix that any member holds."""
        found: dict[Member, None] = {}
        young, old = self.young, self.old
        for key in keys:
            entry = young.get(key) or old.get(key)
            if not entry:
                break
            found = entry
        return found

    def forget(self, member: Member) -> None:
        """The member takes no calls any more: what only it held is nobody's. O(entries), once."""
        for generation in (self.young, self.old):
            for entry in generation.values():
                entry.pop(member, None)

    def record(self, keys: list[int], member: Member) -> None:
        young = self.young
        for key in keys:
            entry = young.get(key)
            if entry is None:
                entry = self.old.pop(key, None)
                if entry is None:
                    entry = {}
                young[key] = entry
            entry[member] = None
        if len(young) >= self.half:
            self.old, self.young = young, {}

    def __len__(self) -> int:
        return len(self.young) + len(self.old)


class Router:
    """Chooses among the members of a ``LoadIndex``; remembers prefixes, sessions and the turn."""

    def __init__(self, config: FabricConfig, loads: LoadIndex) -> None:
        self.config = config
        self.loads = loads
        self.prefixes = PrefixIndex(config.prefix_entries)
        self.sessions: dict[str, Member] = {}
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
        self.sessions = {s: m for s, m in self.sessions.items() if m is not member}

    def choose(self, call: Call) -> Member | None:
        """A member with room for the call, or None when nobody has room."""
        loads = self.loads
        if loads.members <= 1 or not loads.with_room:
            return loads.least()
        route = call.route
        member: Member | None = None
        if route is not None and route.session is not None:
            member = self._by_session(route.session)
        if member is None:
            for strategy in self.chain:
                member = strategy(call)
                if member is not None:
                    break
            else:
                member = loads.least()
        if route is not None and member is not None:
            if self.tracks_prefixes:
                self.prefixes.record(
                    route.keys or route.prefix_keys(self.config.prefix_block), member
                )
            if route.session is not None:
                self._remember(route.session, member)
        return member

    def overloaded(self, member: Member) -> bool:
        """Whether affinity should give way: no room, or far more calls than the mean."""
        loads = self.loads
        load = member.load
        return (
            load * loads.members
            > self.config.overload * loads.total + self.config.overload_slack * loads.members
            or load >= member.window
        )

    def _remember(self, session: str, member: Member) -> None:
        self.sessions.pop(session, None)
        self.sessions[session] = member
        if len(self.sessions) > self.config.prefix_entries:
            del self.sessions[next(iter(self.sessions))]

    def _by_session(self, session: str) -> Member | None:
        member = self.sessions.get(session)
        return None if member is None or self.overloaded(member) else member

    def _by_prefix(self, call: Call) -> Member | None:
        if call.route is None:
            return None
        holders = self.prefixes.holders(call.route.prefix_keys(self.config.prefix_block))
        if not holders:
            return None
        least = self.loads.least()
        if least in holders:
            return least
        best: Member | None = None
        # Bounded: a prefix that very many workers hold is no reason to look at all of them.
        for member in islice(holders, _HOLDERS):
            if member.load < member.window and (best is None or member.load < best.load):
                best = member
        return None if best is None or self.overloaded(best) else best

    def _by_requests(self, call: Call) -> Member | None:
        return self.loads.least()

    def _by_kv_usage(self, call: Call) -> Member | None:
        reporting = [m for m in self.ready if m.has_room and m.kv_usage >= 0]
        return min(reporting, key=lambda m: (round(m.kv_usage, 2), m.load), default=None)

    def _in_turn(self, call: Call) -> Member | None:
        for _ in range(len(self.ready)):
            self.turn = (self.turn + 1) % len(self.ready)
            if self.ready[self.turn].has_room:
                return self.ready[self.turn]
        return None
