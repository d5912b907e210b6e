"""In which order waiting calls are served, against sorting them each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglrl.core.calls import ENDED, QUEUED, SENT, Call
from sglrl.core.waiting import Waiting

pick = st.integers(0, 1 << 16)


def test_calls_that_come_in_order_need_no_heap() -> None:
    queue = Waiting()
    for call in [made(n) for n in range(100)]:
        queue.push(call)
    assert not queue.late
    queue.push(made(100, priority=1))
    assert len(queue.late) == 1


def made(id_: int, priority: int = 0) -> Call:
    call = Call("generate", None, None, priority=priority)  # type: ignore[arg-type]
    call.id = id_
    return call


class WaitingStates(RuleBasedStateMachine):
    """A call that was taken may come again, and one may stand in the queue twice."""

    @initialize()
    def begin(self) -> None:
        self.queue = Waiting()
        self.calls: list[Call] = []
        self.inside: list[Call] = []

    def some(self, n: int, state: int) -> Call | None:
        calls = [call for call in self.calls if call.state == state]
        return calls[n % len(calls)] if calls else None

    def push(self, call: Call) -> None:
        self.queue.push(call)
        self.inside.append(call)

    def right(self) -> Call | None:
        waiting = [call for call in self.inside if call.state == QUEUED]
        return min(waiting, key=lambda call: (-call.priority, call.id), default=None)

    @rule(priority=st.integers(-1, 1))
    def submit(self, priority: int) -> None:
        call = made(len(self.calls), priority)
        self.calls.append(call)
        self.push(call)

    @rule(n=pick)
    def push_once_more(self, n: int) -> None:
        call = self.some(n, QUEUED)
        if call is not None:
            self.push(call)

    @rule()
    def take(self) -> None:
        call = self.queue.first()
        assert call is self.right()
        if call is not None:
            self.queue.take()
            self.inside.remove(call)
            call.state = SENT

    @rule(n=pick)
    def end(self, n: int) -> None:
        call = self.some(n, QUEUED)
        if call is not None:
            call.state = ENDED

    @rule(n=pick)
    def come_again(self, n: int) -> None:
        call = self.some(n, SENT)
        if call is not None:
            # Where it stood before it may still stand, or be passed over already.
            self.queue.bound(0)
            self.inside = [call for call in self.inside if call.state == QUEUED]
            call.state = QUEUED
            self.push(call)

    @rule(most=st.integers(0, 20))
    def bound(self, most: int) -> None:
        self.queue.bound(most)
        assert len(self.queue) <= max(most, sum(call.state == QUEUED for call in self.inside))

    @rule()
    def clear(self) -> None:
        self.queue.clear()
        self.inside.clear()

    @invariant()
    def has_all(self) -> None:
        waiting = [call for call in self.queue if call.state == QUEUED]
        assert sorted(map(id, waiting)) == sorted(
            id(call) for call in self.inside if call.state == QUEUED
        )
        assert self.queue.first() is self.right()


TestWaiting = WaitingStates.TestCase
TestWaiting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
