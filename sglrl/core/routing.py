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
from typing import Final

from ..config import FabricConfig
from .calls import Call
from .members import READY, LoadIndex, Member

_HOLDERS: Final = 8
"""Of those that hold a prefix, so many are looked at."""

Holders = tuple[Member, ...] | dict[Member, None]

_NO_KEYS: Final[list[int]] = []
"""Nobody changes it."""


def _beginnings(most: int) -> tuple[int, ...]:
    found = [0]
    while found[-1] <= most:
        found.append(found[-1] + (1 if found[-1] < 16 else 1 << found[-1].bit_length() - 4))
    return tuple(found)


BEGINNINGS: Final = _beginnings(1 << 32)
"""Which beginnings of a prompt are looked at, in blocks, behind none at all: every one up to 16,
then eight on the way to twice as many. Of a prefix that two prompts share at most an eighth, or a
block, goes unnoticed, and a prompt of 512 blocks has 56 beginnings."""


class Route:
    """What routing may know of a call; shared by the n samples of one prompt, and by the calls of
    one conversation, which go where the one before went (``extend``).

    Attributes:
        tokens: the prompt as int32 bytes.
        version: policy version; KV of different versions is never shared, so neither are prefixes.
        session: name of the session that the call is a turn of.
        sticky: it is a conversation.
        number: of the conversation, where it has one: in a process that has no pool of its own.
        member: who got the call before; it gets the next one of a conversation.
        recorded: how many beginnings there were when ``member`` got the call before. (The whole
            prompt is none of them.)
        waiting: its calls that wait. They share its prompt.
        queued_bytes: size of the prompt when the first of these began to wait.
        _latest: the key of the last of these.
        _keys: of the prompt as it is, if ``_hashed`` says so: of so many bytes.
        _beginnings: how many of the keys are of beginnings.
    """

    __slots__ = (
        "_beginnings",
        "_hashed",
        "_keys",
        "_latest",
        "member",
        "number",
        "queued_bytes",
        "recorded",
        "session",
        "sticky",
        "tokens",
        "version",
        "waiting",
    )

    def __init__(self, tokens: bytes, version: int = 0, session: str | None = None) -> None:
        self.tokens = tokens
        self.version = version
        self.session = session
        self.sticky = False
        self.number = -1
        self.member: Member | None = None
        self.recorded = 0
        self.waiting = 0
        self.queued_bytes = 0
        self._latest = 0
        self._keys: list[int] = _NO_KEYS
        self._beginnings = 0
        self._hashed = 0

    def extend(self, tokens: bytes, version: int) -> None:
        """The next call of a conversation: its tokens begin with those of the one before."""
        self.tokens = tokens
        self.sticky = True
        if version != self.version:
            self.version = version
            self.recorded = self._hashed = 0

    def prefix_keys(self, block: int) -> list[int]:
        """One key for each of some beginnings of the prompt, each depending on all tokens before
        it, then, unless it is a conversation that has a worker, one for the whole prompt. A
        collision costs a cache miss, never a wrong result.

        Beginnings are so many blocks of ``block`` tokens long as ``BEGINNINGS`` says."""
        tokens, size = self.tokens, len(self.tokens)
        if self._hashed != size:
            keys: list[int] = []
            n, width = 0, block * 4
            key, at = self.version, 0
            while (stop := BEGINNINGS[n + 1] * width) <= size:
                key = hash((key, tokens[at:stop]))
                keys.append(key)
                at = stop
                n += 1
            if at < size and not self.recorded:
                keys.append(hash((key, tokens[at:])))
            self._keys = keys
            self._beginnings = n
            self._hashed = size
        return self._keys

    def record(self, index: PrefixIndex, member: Member, block: int) -> None:
        """The member gets the call. Of a conversation that stays with it the longest beginning is
        put down, which is what another that goes on from here will have, too."""
        n = self.recorded
        if self.sticky and n and member is self.member:
            tokens, size, width = self.tokens, len(self.tokens), block * 4
            stop = BEGINNINGS[n + 1] * width
            if stop <= size:
                at, key = BEGINNINGS[n] * width, self._latest
                while stop <= size:
                    key = hash((key, tokens[at:stop]))
                    at = stop
                    n += 1
                    stop = BEGINNINGS[n + 1] * width
                index.record([key], member)
                self._latest = key
                self.recorded = n
            return
        keys = self.prefix_keys(block)
        if not n or member is not self.member:
            self.member = member
            index.record(keys, member)
        self.recorded = n = self._beginnings
        if self.sticky and n:
            # The next turn goes on from the last one; the others are not asked for again.
            self._latest = keys[n - 1]
            self._keys = _NO_KEYS
            self._hashed = 0


class PrefixIndex:
    """Which members have seen which prompt prefix: bounded, approximately least recently used.

    Two generations: entries are read from both and written to the younger; when it holds half of
    ``entries`` the older one is dropped. So an entry is forgotten only after at least
    ``entries / 2`` others were used since its last use.

    An entry of one member, as most are, is the member's own tuple; one of several a dict, in which
    who got the prefix last is last.
    """

    def __init__(self, entries: int) -> None:
        self.half = max(1, entries // 2)
        self.young: dict[int, Holders] = {}
        self.old: dict[int, Holders] = {}

    def holders(self, keys: list[int]) -> Holders:
        """The members known to hold the longest prefix that any member holds."""
        if not keys:
            return ()
        young, old = self.young, self.old
        # Whoever holds more holds the shortest, too. The others need not all be known.
        shortest = young.get(keys[0]) or old.get(keys[0]) or ()
        if shortest and len(keys) > 1:
            for key in reversed(keys):
                found = young.get(key) or old.get(key)
                if found:
                    return found
        return shortest

    def forget(self, member: Member) -> None:
        """The member takes no calls any more: what only it held is nobody's. O(entries), once."""
        for generation in (self.young, self.old):
            for key, entry in generation.items():
                if entry is member.alone:
                    generation[key] = ()
                elif isinstance(entry, dict):
                    entry.pop(member, None)

    def record(self, keys: list[int], member: Member) -> None:
        young, old, alone = self.young, self.old, member.alone
        for key in keys:
            entry = young.get(key)
            if entry is alone:
                continue
            if not entry and old:
                entry = old.pop(key, None)
            if not entry or entry is alone:
                young[key] = alone
            elif isinstance(entry, dict):
                entry.pop(member, None)
                entry[member] = None
                young[key] = entry
            else:
                young[key] = {entry[0]: None, member: None}
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
            member = route.member if route.sticky else None
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
