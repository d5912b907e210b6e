"""The order in which waiting calls are served, compared with sorting them each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglrl.core.calls import ENDED, QUEUED, SENT, Call
from sglrl.core.clients import ClientState
from sglrl.core.fair_queue import FairQueue, Waiting

pick = st.integers(0, 1 << 16)
rarely = st.sampled_from([False, False, False, True])


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
    """A call that was sent may return, and a call may be in the queue twice."""

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
            # The call's old entry may still be in the queue, or may have been removed.
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


class FairStates(RuleBasedStateMachine):
    """Calls of three clients that take turns, compared with sorting. One client may be blocked."""

    @initialize()
    def begin(self) -> None:
        self.queues = [FairQueue(), FairQueue()]
        self.clients = [ClientState(turn, 1) for turn in range(3)]
        self.turns = len(self.clients)
        self.inside: list[list[Call]] = [[], []]
        self.count = 0

    def right(self, n: int) -> Call | None:
        waiting = [
            call
            for call in self.inside[n]
            if call.state == QUEUED and call.client is not None and not call.client.unread
        ]

        def order(call: Call) -> tuple[int, int, int]:
            assert call.client is not None
            return (-call.priority, call.client.turn, call.id)

        return min(waiting, key=order, default=None)

    @rule(
        client=pick,
        priorities=st.lists(st.integers(-1, 1), min_size=1, max_size=4),
        into=st.sampled_from([[0], [1], [0, 1]]),
    )
    def submit(self, client: int, priorities: list[int], into: list[int]) -> None:
        """Push calls into one queue or both. Calls that prefer one member are in both."""
        for priority in priorities:
            call = made(self.count, priority)
            call.client = self.clients[client % 3]
            self.count += 1
            for n in into:
                self.queues[n].push(call)
                self.inside[n].append(call)

    @rule(n=st.integers(0, 1), count=st.integers(1, 5))
    def serve(self, n: int, count: int) -> None:
        for _ in range(count):
            call = self.queues[n].first()
            assert call is self.right(n)
            if call is None:
                return
            assert call.client is not None
            self.queues[n].take(call)
            self.inside[n].remove(call)
            call.state = SENT
            call.client.turn = self.turns
            self.turns += 1

    @rule(n=pick)
    def end(self, n: int) -> None:
        waiting = [call for calls in self.inside for call in calls if call.state == QUEUED]
        if waiting:
            waiting[n % len(waiting)].state = ENDED

    @rule(client=pick)
    def block(self, client: int) -> None:
        self.clients[client % 3].unread = 1

    @rule(client=pick)
    def wake(self, client: int) -> None:
        woken = self.clients[client % 3]
        woken.unread = 0
        woken.waiting = sum(call.client is woken for calls in self.inside for call in calls)
        woken.wake()

    @rule(n=st.integers(0, 1), client=pick)
    def sweep(self, n: int, client: int) -> None:
        self.queues[n].sweep(self.clients[client % 3])

    @rule(client=pick, really=rarely)
    def drop(self, client: int, really: bool) -> None:
        """Drop a client after all its calls have ended."""
        if not really:
            return
        gone = self.clients[client % 3]
        for queue, calls in zip(self.queues, self.inside, strict=True):
            for call in calls:
                if call.client is gone:
                    call.state = ENDED
            queue.drop(gone)

    @rule(n=st.integers(0, 1), really=rarely)
    def clear(self, n: int, really: bool) -> None:
        if really:
            self.queues[n].clear()
            self.inside[n].clear()

    @invariant()
    def has_all(self) -> None:
        if not hasattr(self, "queues"):
            return
        for n, queue in enumerate(self.queues):
            waiting = [call for call in queue if call.state == QUEUED]
            assert sorted(map(id, waiting)) == sorted(
                id(call) for call in self.inside[n] if call.state == QUEUED
            )
            assert queue.first() is self.right(n)
            assert len(queue._heap) <= 8 + 2 * 3


TestFairQueue = FairStates.TestCase
TestFairQueue.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
