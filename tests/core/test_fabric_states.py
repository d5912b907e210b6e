"""Run any order of events of a pool, and compare the fabric with the model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import Raw

from sglrl.config import ROUTING_STRATEGIES, FabricConfig
from sglrl.core.calls import Call
from sglrl.core.clients import ClientState
from sglrl.core.fabric import Fabric
from sglrl.core.invariants import validate
from sglrl.core.members import Member
from sglrl.core.prefixes import Route
from sglrl.errors import SglrlError
from sglrl.wire.calls import Item, ItemKind

from .fabric_model import (
    CANCELLING,
    ENDED,
    RUNNING,
    SENT,
    WAITING,
    Model,
    ModelMember,
)

pick = st.integers(0, 1 << 16)
"""Chooses one of the objects that exist at the moment, modulo their number."""

rarely = st.sampled_from([False, False, True])
"""Ends must be rarer than beginnings, or there would be nothing to test."""

routes = st.none() | st.builds(
    Route,
    tokens=st.sampled_from([b"\1\0\0\0" * n for n in (1, 4, 9)]),
    version=st.integers(0, 1),
    session=st.none() | st.sampled_from("ab"),
)


RETRIES = ["never", "repeat", "resume"]


class FabricStates(RuleBasedStateMachine):
    @initialize(
        max_queue=st.sampled_from([50, 3, 1, 0]),
        max_queue_bytes=st.sampled_from([1 << 30, 1 << 30, 40]),
        max_calls_per_client=st.sampled_from([None, None, 2]),
        max_unread=st.lists(st.sampled_from([1 << 30, 25]), min_size=1, max_size=2),
        max_attempts=st.integers(1, 3),
        routing=st.lists(st.sampled_from(ROUTING_STRATEGIES), min_size=1, max_size=3),
        windows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    )
    def begin(
        self,
        max_queue: int,
        max_queue_bytes: int,
        max_calls_per_client: int | None,
        max_unread: list[int],
        max_attempts: int,
        routing: list[str],
        windows: list[int],
    ) -> None:
        self.now = 0.0
        self.strays = 0
        self.conversations = [Route(bytes([n, 0, 0, 0])) for n in range(6)]
        config = FabricConfig(
            routing=tuple(routing),
            max_queue=max_queue,
            max_queue_bytes=max_queue_bytes,
            max_calls_per_client=max_calls_per_client,
            max_attempts=max_attempts,
            prefix_block=2,
            prefix_entries=8,
            overload_slack=1,
        )
        # The first client is the pool's own.
        self.model = Model(config, [1 << 30, *max_unread])
        self.fabric = Fabric(config)
        clients: list[ClientState | None] = [None]
        clients += [self.fabric.queue.add_client(most) for most in max_unread]
        self.clients = list(zip(clients, self.model.clients, strict=True))
        for index, window in enumerate(windows):
            self.join()
            self.fabric.member_ready(index, window, self.now)
            self.model.members[index].state = "ready"
            self.model.members[index].window = window

    def judge(self, wanted: list[Any]) -> None:
        effects, self.fabric.outbox = self.fabric.outbox, []
        self.model.judge(effects, wanted)

    def member(self, n: int, *states: str) -> ModelMember | None:
        found = [m for m in self.model.members.values() if not states or m.state in states]
        return found[n % len(found)] if found else None

    # --- members ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.members) < 5)
    @rule()
    def join(self) -> None:
        index = len(self.model.members)
        self.model.add_process(self.fabric.add_member(index))
        with pytest.raises(SglrlError):
            self.fabric.add_member(index)
        self.judge([])

    @rule(n=pick, window=st.integers(1, 3))
    def ready(self, n: int, window: int) -> None:
        member = self.member(n)
        if member is None:
            return
        with pytest.raises(SglrlError):
            self.fabric.member_ready(member.index, 0, self.now)
        if member.state not in ("starting", "syncing", "stale", "away"):
            with pytest.raises(SglrlError):
                self.fabric.member_ready(member.index, window, self.now)
            self.judge([])
            return
        self.fabric.member_ready(member.index, window, self.now)
        member.state, member.window = "ready", window
        self.judge([])

    @rule(n=pick, stale=st.booleans())
    def wait_for_weights(self, n: int, stale: bool) -> None:
        """A worker that is up but has old weights gets no calls, in every state of its update."""
        member = self.member(n)
        if member is None:
            return
        if stale and member.state == "syncing":
            self.fabric.members[member.index].move("stale")
            member.state = "stale"
        elif member.state in ("starting", "stale", "away"):
            self.fabric.member_arrived(member.index, 1)
            member.state = "syncing"
        elif member.state != "syncing":
            with pytest.raises(SglrlError):
                self.fabric.member_arrived(member.index, 1)
        self.judge([])

    @rule(n=pick)
    def replace(self, n: int) -> None:
        member = self.member(n, "lost")
        if member is not None:
            self.model.add_process(self.fabric.add_member(member.index))
            self.judge([])

    @rule(n=pick, really=rarely)
    def retire(self, n: int, really: bool) -> None:
        member = self.member(n)
        if member is not None and really:
            self.fabric.member_retired(member.index, "it fails at once")
            self.judge(self.model.retire(member.index) if member.state == "lost" else [])

    @rule(n=pick, really=rarely)
    def drain(self, n: int, really: bool) -> None:
        member = self.member(n)
        if member is None or not really:
            return
        if member.state != "ready":
            with pytest.raises(SglrlError):
                self.fabric.drain_member(member.index, self.now)
            self.judge([])
            return
        self.fabric.drain_member(member.index, self.now)
        self.judge(self.model.drain(member.index))

    @rule(n=pick, really=rarely, returns=st.booleans())
    def lose(self, n: int, really: bool, returns: bool) -> None:
        member = self.member(n)
        if member is not None and really:
            self.fabric.member_lost(member.index, "it was killed", self.now, returns=returns)
            self.judge(self._lose(member, returns))

    @rule(n=pick, really=rarely)
    def go_away(self, n: int, really: bool) -> None:
        """The connection to a worker breaks. The worker may return, or be lost."""
        member = self.member(n)
        if member is None or not really:
            return
        if member.state not in ("ready", "syncing", "stale"):
            with pytest.raises(SglrlError):
                self.fabric.member_away(member.index, "its connection broke", self.now)
            self.judge([])
            return
        self.fabric.member_away(member.index, "its connection broke", self.now)
        self.judge(self.model.away(member.index))

    def _lose(self, member: ModelMember, returns: bool) -> list[Any]:
        gone = member.state in ("lost", "retired")
        return [] if gone else self.model.lose(member.index, returns)

    # --- calls ------------------------------------------------------------------------------------

    @rule(
        priority=st.integers(-1, 2),
        pinned=st.sampled_from([None, None, None, None, 0, 1, 2, 7]),
        deadline=st.none() | st.integers(-1, 9),
        retry=st.sampled_from(RETRIES),
        stream=st.booleans(),
        route=routes,
        copies=st.integers(1, 4),
        client=pick,
        answer=st.sampled_from([0, 10, 30]),
    )
    def submit(
        self,
        priority: int,
        pinned: int | None,
        deadline: int | None,
        retry: str,
        stream: bool,
        route: Route | None,
        copies: int,
        client: int,
        answer: int,
    ) -> None:
        for _ in range(copies):
            self.submit_one(priority, pinned, deadline, retry, stream, route, client, answer)

    @rule(
        settings=st.lists(
            st.tuples(
                st.integers(0, 2), st.sampled_from(RETRIES), st.booleans(), st.booleans(), pick
            ),
            min_size=2,
            max_size=8,
        )
    )
    def submit_several(self, settings: list[tuple[int, str, bool, bool, int]]) -> None:
        """Submit several calls for any worker: most histories need some work to be interesting."""
        for priority, retry, stream, timed, client in settings:
            self.submit_one(priority, None, 4 if timed else None, retry, stream, None, client, 0)

    @rule(n=pick, retries=st.lists(st.sampled_from(RETRIES), max_size=4), stream=st.booleans())
    def submit_bound(self, n: int, retries: list[str], stream: bool) -> None:
        """Submit calls for one process, which may have been replaced."""
        processes = list(self.model.processes)
        if processes:
            to = processes[n % len(processes)]
            for retry in retries:
                self.submit_one(0, to.index, None, retry, stream, None, n, 0, to)

    @rule(turns=st.lists(st.tuples(pick, st.integers(0, 1)), min_size=3, max_size=10))
    def converse(self, turns: list[tuple[int, int]]) -> None:
        """Submit the next turns of a few conversations. Each conversation belongs to one client."""
        for n, priority in turns:
            n %= len(self.conversations)
            one = self.conversations[n]
            one.extend(one.tokens + b"\1\0\0\0" * 3, 0)
            self.submit_one(priority, None, None, "resume", False, one, n, 0)

    @rule(
        n=pick,
        size=st.sampled_from([0, 10, 30]),
        answers=st.lists(st.sampled_from([0, 30]), max_size=4),
    )
    def leave_unread(self, n: int, size: int, answers: list[int]) -> None:
        """A client in another process does not read its answers, and submits more calls."""
        n = 1 + n % (len(self.clients) - 1)
        state, client = self.clients[n]
        assert state is not None
        state.unread += size
        client.unread += size
        for answer in answers:
            self.submit_one(0, None, None, "repeat", False, None, n, answer)

    @rule(n=pick, size=st.sampled_from([5, 60, 90]))
    def client_reads(self, n: int, size: int) -> None:
        state, client = self.clients[1 + n % (len(self.clients) - 1)]
        size = min(size, client.unread)
        if state is not None and size:
            client.unread -= size
            self.fabric.read_by_client(state, size, self.now)
            self.judge([])

    @rule(every=st.integers(1, 3))
    def progress(self, every: int) -> None:
        """Report a chunk for every call, or for every second or third call."""
        for member in self.model.members.values():
            items = [Item(id_, ItemKind.CHUNK) for id_ in sorted(member.held)[::every]]
            wanted, _ = self.model.results(member.index, items)
            self.fabric.results(self.fabric.members[member.index], items, self.now)
            self.judge(wanted)

    def submit_one(
        self,
        priority: int,
        pinned: int | None,
        deadline: int | None,
        retry: str,
        stream: bool,
        route: Route | None,
        client: int,
        answer: int,
        bound_to: Member | None = None,
    ) -> None:
        state, known = self.clients[client % len(self.clients)]
        call = Call(
            "work",
            Raw(b"\x90"),
            None,
            deadline=None if deadline is None else self.now + deadline,
            priority=priority,
            pinned=pinned,
            route=route,
            idempotent=retry != "never",
            stream=stream,
            resumable=retry == "resume",
            frames=[b"frame"] if answer else (),
            client=state,
        )
        call.bound_to = bound_to
        call.answer_bytes = answer if state is not None else 0
        call.extra_bytes = priority + 1
        refusal = self.model.refusal(call, known)
        if refusal is not None:
            with pytest.raises(refusal):
                self.fabric.submit(call, self.now)
            self.fabric.cancel(call, self.now)
        else:
            self.fabric.submit(call, self.now)
            assert call.id not in self.model.calls
            self.model.submitted(call, known)
        self.judge([])

    @rule(
        n=pick,
        picks=st.lists(
            st.tuples(
                pick,
                st.sampled_from([ItemKind.CHUNK, *range(5)]),
                st.sampled_from([False, False, False, False, True]),
            ),
            min_size=1,
            max_size=6,
        ),
    )
    def results(self, n: int, picks: list[tuple[int, int, bool]]) -> None:
        """Report items for calls that the member holds, and some for other calls."""
        holders = [m for m in self.model.members.values() if m.held]
        member = holders[n % len(holders)] if holders and n % 8 else self.member(n)
        if member is None:
            return
        items = []
        held = sorted(member.held)
        for at, kind, stray in picks:
            if stray or not held:
                items.append(Item(at % (len(self.model.calls) + 3), kind))
            else:
                items.append(Item(held[at % len(held)], kind))
        wanted, strays = self.model.results(member.index, items)
        self.strays += strays
        self.fabric.results(self.fabric.members[member.index], items, self.now)
        self.judge(wanted)

    @rule(n=pick)
    def confirm_cancelled(self, n: int) -> None:
        calls = self.model.in_state(CANCELLING)
        if calls:
            call = calls[n % len(calls)].call
            assert call.worker is not None
            item = Item(call.id, ItemKind.CANCELLED)
            wanted, _ = self.model.results(call.worker.index, [item])
            self.fabric.results(call.worker, [item], self.now)
            self.judge(wanted)

    @rule(n=pick)
    def cancel(self, n: int) -> None:
        if self.model.calls:
            live = self.model.in_state(WAITING, SENT, RUNNING)
            calls = live if live and n % 4 else list(self.model.calls.values())
            call = calls[n % len(calls)]
            self.fabric.cancel(call.call, self.now)
            self.judge(self.model.cancel(call))

    @rule(seconds=st.integers(0, 3))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.fabric.tick(self.now)
        self.judge(self.model.tick(self.now))

    @precondition(lambda self: len(self.model.calls) > 20)
    @rule(really=rarely)
    def close(self, really: bool) -> None:
        if really:
            self.fabric.close()
            self.judge(self.model.close())

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "fabric"):
            return
        fabric, model = self.fabric, self.model
        validate(fabric)
        assert fabric.queue.waiting == len(model.in_state(WAITING))
        assert fabric.queue.queued_bytes == model.queued_bytes()
        for state, client in self.clients:
            if state is not None:
                assert state.unread == model.unread(client)
                assert state.waiting == sum(c.client is client for c in model.in_state(WAITING))
        assert fabric.stray_items == self.strays
        for index, member in model.members.items():
            real = fabric.members[index]
            assert real.state == member.state
            assert set(real.calls) == member.held
            assert real.load == len(member.held) <= max(real.window, 0)
        live = model.in_state(WAITING, SENT, RUNNING)
        assert set(fabric.calls) == {c.call.id for c in live}
        deadlines = [c.call.deadline for c in live if c.call.deadline is not None]
        assert fabric.next_deadline() == min(deadlines, default=None)

    def teardown(self) -> None:
        if not hasattr(self, "fabric"):
            return
        for index, member in self.model.members.items():
            self.fabric.member_lost(index, "the end", self.now)
            self.judge(self._lose(member, False))
        self.fabric.close()
        self.judge(self.model.close())
        self.same_as_the_model()
        assert self.fabric.calls == {}
        assert self.fabric.queue.waiting == self.fabric.loads.total == 0
        assert self.fabric.queue.queued_bytes == self.fabric.queue.clients == 0
        for state, client in self.clients:
            assert state is None or state.unread == client.unread
        assert all(m.load == 0 for m in self.fabric.members.values())
        for call in self.model.calls.values():
            assert call.state == ENDED
            assert call.answers == (0 if call.cancelled else 1), call


TestFabricStates = FabricStates.TestCase
TestFabricStates.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
