"""The prefixes of prompts, and the workers that hold these prefixes in their prefix caches."""

from __future__ import annotations

from typing import Any, Final, Generic, Protocol, TypeVar


class Holder(Protocol):
    """The part of a ``Member`` that calls and prefixes use: one worker."""

    index: int
    alone: Any
    """A tuple that contains only the worker."""


H = TypeVar("H", bound=Holder)
Holders = tuple[H, ...] | dict[H, None]

_NO_KEYS: Final[list[int]] = []
"""An empty list that is never mutated."""


def _beginnings(most: int) -> tuple[int, ...]:
    lengths = [0]
    while lengths[-1] <= most:
        lengths.append(lengths[-1] + (1 if lengths[-1] < 16 else 1 << lengths[-1].bit_length() - 4))
    return tuple(lengths)


BEGINNINGS: Final = _beginnings(1 << 32)
"""Lengths in blocks of the prompt prefixes that are compared. The first length is 0.

Every length up to 16 is included, and eight lengths in each doubling after that. Two prompts that
share a prefix thus miss at most an eighth of it, or one block. A prompt of 512 blocks has 56
prefixes.
"""


class Route:
    """The properties of a call that routing uses.

    The n samples of one prompt share a route. The calls of one conversation also share a route
    (``extend``): each call goes to the worker of the previous call.

    Attributes:
        tokens: the prompt as int32 bytes.
        version: policy version. Versions never share KV, so they never share prefixes.
        session: name of the session of which the call is a turn.
        sticky: whether the route belongs to a conversation.
        number: serial number of the conversation; -1 if it has none. Only a client of a remote pool
            numbers its conversations.
        member: the worker of the previous call. It gets the next call of a conversation.
        recorded: number of prefixes of the prompt when ``member`` got the previous call. The whole
            prompt does not count as a prefix.
        waiting: number of waiting calls of this route. They share the prompt.
        queued_bytes: size of the prompt when the first of the waiting calls began to wait.
        _latest: key of the last recorded prefix.
        _keys: keys of the prompt when it had ``_hashed`` bytes. They are valid only while the
            prompt still has this size.
        _beginnings: number of ``_keys`` without the key of the whole prompt.
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
        """Set the prompt of the conversation's next call. It extends the previous prompt."""
        self.tokens = tokens
        self.sticky = True
        if version != self.version:
            self.version = version
            self.recorded = self._hashed = 0

    def prefix_keys(self, block: int) -> list[int]:
        """Return one key for each compared prefix, then one key for the whole prompt.

        The prefixes have the lengths of ``BEGINNINGS``, in blocks of ``block`` tokens. Each key
        depends on all tokens of its prefix. A conversation with ``recorded`` prefixes has no key
        for the whole prompt. A collision costs a cache miss, never a wrong result.
        """
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
        """Record that the member gets the call.

        If a conversation stays with its member, only the longest prefix of the prompt is recorded.
        This suffices, because another conversation that continues from the end of this prompt also
        has this prefix.
        """
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
            # The next turn computes its keys from the last key. The other keys are not needed.
            self._latest = keys[n - 1]
            self._keys = _NO_KEYS
            self._hashed = 0


class PrefixIndex(Generic[H]):
    """A bounded map of prompt prefixes to the members that hold them, approximately LRU.

    The map has two generations. Entries are read from both and written to the younger generation.
    When the younger generation holds half of ``entries``, it becomes the older generation, and the
    previous older one is dropped. An entry is thus forgotten only after at least ``entries / 2``
    other entries were used since its last use.

    Most entries have one member. Such an entry is the tuple ``alone`` of this member. An entry of
    several members is a dict, whose last key is the member that got the prefix last.
    """

    def __init__(self, entries: int) -> None:
        self.half = max(1, entries // 2)
        self.young: dict[int, Holders[H]] = {}
        self.old: dict[int, Holders[H]] = {}

    def holders(self, keys: list[int]) -> Holders[H]:
        """Return the members that hold the longest of these prefixes that the index contains."""
        if not keys:
            return ()
        young, old = self.young, self.old
        # A member that holds any prefix also holds the shortest prefix. The index may lack some of
        # the longer ones, so each of them is looked up.
        shortest = young.get(keys[0]) or old.get(keys[0]) or ()
        if shortest and len(keys) > 1:
            for key in reversed(keys):
                holders = young.get(key) or old.get(key)
                if holders:
                    return holders
        return shortest

    def forget(self, member: H) -> None:
        """Remove a member from all entries, because it accepts no more calls. Costs O(entries)."""
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
