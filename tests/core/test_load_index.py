"""The member with the least load, compared with counting the load each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglrl.core.members import READY, LoadIndex, Member

pick = st.integers(0, 1 << 16)


class LoadStates(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.index = LoadIndex()
        self.joined: list[Member] = []
        self.made = 0

    @rule(window=st.integers(1, 4), load=st.integers(0, 4))
    def join(self, window: int, load: int) -> None:
        member = Member(self.made)
        self.made += 1
        member.state, member.window, member.load = READY, window, min(load, window)
        self.index.join(member)
        self.joined.append(member)

    @rule(n=pick)
    def leave(self, n: int) -> None:
        if self.joined:
            self.index.leave(self.joined.pop(n % len(self.joined)))

    @rule(n=pick)
    def reserve(self, n: int) -> None:
        free = [m for m in self.joined if m.load < m.window]
        if free:
            self.index.reserve(free[n % len(free)])

    @rule(n=pick)
    def reserve_beyond_the_window(self, n: int) -> None:
        if self.joined:
            self.index.reserve(self.joined[n % len(self.joined)])

    @rule()
    def reserve_least(self) -> None:
        member = self.checked_least()
        if member is not None:
            self.index.reserve(member)

    @rule(n=pick, count=st.integers(1, 4))
    def release(self, n: int, count: int) -> None:
        loaded = [m for m in self.joined if m.load]
        if loaded:
            member = loaded[n % len(loaded)]
            self.index.release(member, min(count, member.load))

    @rule()
    def ask(self) -> None:
        """Ask not after every step: a query sorts all changes since the last query."""
        self.checked_least()

    def checked_least(self) -> Member | None:
        free = [m for m in self.joined if m.load < m.window]
        least = self.index.least()
        if not free:
            assert least is None
        else:
            assert least in free
            assert least.load == min(m.load for m in free)
        return least

    @invariant()
    def same_as_counted(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.members == len(self.joined)
        assert self.index.total == sum(m.load for m in self.joined)
        assert self.index.with_room == sum(m.load < m.window for m in self.joined)


TestLoadStates = LoadStates.TestCase
TestLoadStates.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_equally_loaded_members_take_turns() -> None:
    index = LoadIndex()
    members = [Member(i) for i in range(1000)]
    for member in members:
        member.state, member.window = READY, 64
        index.join(member)
    for _ in range(3):
        turn = []
        for _ in members:
            member = index.least()
            assert member is not None
            turn.append(member.index)
            index.reserve(member)
        assert turn == list(range(1000))
    assert index.total == 3000


def test_a_window_may_be_as_large_as_a_number() -> None:
    """A driver in another process looks like one worker with a huge window."""
    index = LoadIndex()
    members = [Member(i) for i in range(2)]
    for member in members:
        member.state, member.window = READY, 1 << 62
        index.join(member)
    index.reserve(members[0])
    assert index.least() is members[1]
