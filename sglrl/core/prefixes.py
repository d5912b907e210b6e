"""The prefixes of prompts, and the workers that hold them in their prefix caches."""

from __future__ import annotations

from typing import Any, Final, Generic, Protocol, TypeVar


class Holder(Protocol):
    """A worker, as calls and prefixes know it: a ``Member``."""

    index: int
    alone: Any
    """A tuple of the worker itself."""


H = TypeVar("H", bound=Holder)
Holders = tuple[H, ...] | dict[H, None]

_NO_KEYS: Final[list[int]] = []
"""Never changed."""


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
        self.member: Holder | None = None
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

    def record(self, index: PrefixIndex[H], member: H, block: int) -> None:
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


class PrefixIndex(Generic[H]):
    """Which members have seen which prompt prefix: bounded, approximately least recently used.

    Two generations: entries are read from both and written to the younger; when it holds half of
    ``entries`` the older one is dropped. So an entry is forgotten only after at least
    ``entries / 2`` others were used since its last use.

    An entry of one member, as most are, is the member's own tuple; one of several a dict, in which
    who got the prefix last is last.
    """

    def __init__(self, entries: int) -> None:
        self.half = max(1, entries // 2)
        self.young: dict[int, Holders[H]] = {}
        self.old: dict[int, Holders[H]] = {}

    def holders(self, keys: list[int]) -> Holders[H]:
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

    def forget(self, member: H) -> None:
        """The member takes no calls any more: what only it held is nobody's. O(entries), once."""
        for generation in (self.young, self.old):
            for key, entry in generation.items():
                if entry is member.alone:
                    generation[key] = ()
                elif isinstance(entry, dict):
                    entry.pop(member, None)

    def record(self, keys: list[int], member: H) -> None:
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
