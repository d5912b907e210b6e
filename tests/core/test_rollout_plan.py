"""The plan of a run, compared with a model that records everything and searches its records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglrl.core.policy_versions import MODEL, Versions, age, oldest_of
from sglrl.core.rollout_group import (
    DONE,
    DROPPED,
    FILTERED,
    LOST,
    MAX_LOSSES,
    MOST_STALE,
    POSTPONED,
    READY,
    RUNNING,
    STALE,
    SUSPECT,
    TAKEN,
    WAITING,
    Group,
    Sample,
)
from sglrl.core.rollout_plan import Plan, TooSlow

ADAPTERS = ["x", "y"]
LORA_AGES = st.dictionaries(st.sampled_from(ADAPTERS), st.integers(0, 3))


def model(version: int) -> dict[str, int]:
    """Return the versions of a run without adapters."""
    return {MODEL: version}


class PlanMachine(RuleBasedStateMachine):
    """Random events for a plan, compared with the groups and samples that the model records."""

    @initialize(
        group_size=st.integers(1, 4),
        short=st.integers(0, 3),
        retries=st.integers(0, 2),
        batch_size=st.integers(1, 3),
        staleness=st.none() | st.integers(0, 2),
        ahead=st.none() | st.integers(1, 4),
        most_ready=st.integers(1, 4),
        version=st.integers(0, 5),
    )
    def begin_run(
        self,
        group_size: int,
        short: int,
        retries: int,
        batch_size: int,
        staleness: int | None,
        ahead: int | None,
        most_ready: int,
        version: int,
    ) -> None:
        self.group_size = group_size
        self.min_group = max(1, group_size - short)
        self.retries = retries
        self.batch_size = batch_size
        self.staleness = staleness
        self.ahead = ahead
        self.most_ready = most_ready
        self.plan = Plan(
            group_size=group_size,
            min_group=self.min_group,
            retries=retries,
            batch_size=batch_size,
            max_staleness=staleness,
            ahead=ahead,
            most_ready=most_ready,
            versions={MODEL: version, "x": 3},
        )
        self.versions = {MODEL: version, "x": 3}
        self.steps = 0
        self.since: Counter[str] = Counter()
        """New versions of each policy since the last group was taken."""
        self.used = {MODEL}
        self.wanted = 0
        self.groups: list[Group] = []
        self.running: list[Sample] = []
        self.order: list[Group] = []
        self.taken: list[Group] = []
        self.filtered = 0
        self.runs: Counter[tuple[int, int]] = Counter()
        """Runs of each sample of each item, except runs whose process was lost."""
        self.losses: Counter[tuple[int, int]] = Counter()
        self.stale: Counter[tuple[int, int]] = Counter()
        """Runs of each sample of each item whose tokens became too old."""
        self.stale_again = 0
        """Number of stale runs after which the sample may run again."""
        self.final: set[tuple[int, int]] = set()
        self.condemned: set[Group] = set()
        self.counted: dict[Group, int] = {}
        """Samples that were DONE when the READY group was last checked."""

    @staticmethod
    def name(sample: Sample) -> tuple[int, int]:
        return sample.group.index, sample.index

    def may_run_again(self, item: int) -> list[int]:
        names = [(item, i) for i in range(self.group_size)]
        return [n[1] for n in names if self.runs[n] <= self.retries and n not in self.final]

    def too_old(self, oldest: Versions) -> bool:
        if self.staleness is None:
            return False
        return any(self.versions[name] - v > self.staleness for name, v in oldest.items())

    def note_ready(self, group: Group | None) -> None:
        if group is not None:
            assert group.state is READY
            if group in self.order:
                # A sample became too old and ran again.
                self.order.remove(group)
            self.order.append(group)
            self.counted[group] = len(group.done)

    @rule()
    def begin_a_group(self) -> None:
        if sum(g.state is RUNNING for g in self.groups) < 3:
            self.begin_one()

    def begin_one(self) -> None:
        live = [g for g in self.groups if g.state in (RUNNING, READY)]
        ready = [g for g in live if g.state is READY]
        may = len(ready) < max(self.most_ready, self.wanted)
        if self.ahead is not None:
            may = may and len(live) < max(self.ahead, self.wanted)
        if self.staleness is not None:
            # AReaL, equation 3, counted over the groups taken and the groups in progress.
            begun = len(self.taken) + len(live)
            steps = self.steps + max(self.since.values(), default=0)
            may = may and begun < (steps + self.staleness + 1) * self.batch_size
        assert self.plan.may_begin() == may
        if may:
            again = self.plan.begin_again()
            if again is None:
                index = len({g.index for g in self.groups})
                again = self.plan.begin(index, f"item {index}")
                assert [s.index for s in again.samples] == [*range(self.group_size)]
            else:
                assert not again.late or again.tries
            self.check_begun_again(again)
            self.groups.append(again)

    def check_begun_again(self, group: Group) -> None:
        assert [s.index for s in group.samples] == self.may_run_again(group.index)
        assert len(group.samples) >= self.min_group
        assert all(s.tries == self.runs[self.name(s)] for s in group.samples)
        assert all(s.losses == self.losses[self.name(s)] for s in group.samples)
        assert all(s.stale == self.stale[self.name(s)] for s in group.samples)
        assert group.item == f"item {group.index}"

    @rule(suspect=st.booleans(), count=st.integers(1, 4))
    def start_samples(self, suspect: bool, count: int) -> None:
        for _ in range(count):
            self.start_a_sample(suspect)

    def start_a_sample(self, suspect: bool) -> None:
        waiting = [
            s
            for g in self.groups
            if g.state is RUNNING
            for s in g.samples
            if s.state is WAITING and (suspect or self.losses[self.name(s)] < SUSPECT)
        ]
        sample = self.plan.start(suspect=suspect)
        assert (sample is None) == (not waiting)
        if sample is not None:
            assert sample in waiting
            self.begin_running(sample)

    def begin_running(self, sample: Sample) -> None:
        self.running.append(sample)
        self.runs[self.name(sample)] += 1
        assert self.runs[self.name(sample)] <= 1 + self.retries

    def observed(self, act: Callable[[], Group | None]) -> None:
        """Run an event that may find samples too old. Record and check what becomes of them."""
        groups = {g: g.state for g in self.groups}
        before = {s: (s.state, s.stale, s.oldest) for g in self.groups for s in g.samples}
        ready = act()
        for sample, (state, stale, oldest) in before.items():
            name, group = self.name(sample), sample.group
            if sample.stale > stale:
                assert sample.stale == stale + 1 == self.stale[name] + 1
                assert state is RUNNING or self.too_old(oldest)
                assert self.staleness is not None
                self.stale[name] += 1
                if group.late and self.stale[name] == 2 * MOST_STALE:
                    assert (sample.state, sample.lost_by) == (LOST, STALE)
                    self.final.add(name)
                    self.reported(group, lost=True)
                else:
                    # The run does not count, whatever becomes of the group.
                    self.runs[name] -= 1
                    self.stale_again += 1
                    assert sample.state is (WAITING if group.state is RUNNING else LOST)
                if not group.late and self.stale[name] == MOST_STALE:
                    assert group.state in (POSTPONED, DROPPED)
            elif group.state is POSTPONED is not groups[group] and state in (RUNNING, DONE):
                # Nor do the runs that are given up with the group.
                self.runs[name] -= 1
        for group, state in groups.items():
            if group.state is POSTPONED is not state:
                assert any(self.stale[self.name(s)] == MOST_STALE for s in group.samples)
                assert not group.late
                self.reported(group, lost=False)
        assert not self.plan.too_slow
        self.note_ready(ready)

    def reported(self, group: Group, *, lost: bool) -> None:
        self.plan.too_slow.remove(TooSlow(group.index, lost))

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        age=st.integers(0, 3),
        loras=st.dictionaries(st.sampled_from(ADAPTERS), st.integers(0, 3)),
    )
    def a_sample_ends_well(self, data: st.DataObject, age: int, loras: dict[str, int]) -> None:
        sample = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.end_well(sample, {MODEL: age, **loras})

    @rule(age=st.integers(0, 1), loras=LORA_AGES)
    def a_group_ends_well(self, age: int, loras: dict[str, int]) -> None:
        if not self.running:
            self.begin_one()
        for _ in range(self.group_size):
            self.start_a_sample(True)
        for sample in [s for s in self.running if s.group is self.running[0].group]:
            self.running.remove(sample)
            self.end_well(sample, {MODEL: age, **loras})

    def end_well(self, sample: Sample, ages: dict[str, int]) -> None:
        oldest = {n: max(0, self.versions[n] - a) for n, a in ages.items() if n in self.versions}
        alive, too_old = sample.group.state is RUNNING, self.too_old(oldest)
        self.used.update(oldest)
        self.observed(lambda: self.plan.done(sample, object(), oldest))
        if alive and not too_old:
            assert sample.state is DONE
        else:
            assert sample.state is (LOST if not alive else sample.state)
            assert sample.state is not DONE
            assert sample.result is None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["retry", "lose", "final", "stale"]))
    def a_sample_fails(self, data: st.DataObject, how: str) -> None:
        sample = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how == "stale" and self.staleness is not None:
            self.observed(lambda: self.plan.failed(sample, STALE, retry=False))
            return
        retry, name = how == "retry", self.name(sample)
        again = retry and self.runs[name] <= self.retries and sample.group.state is RUNNING
        if how == "final" and sample.group.state is RUNNING:
            self.final.add(name)
        self.note_ready(self.plan.failed(sample, "error", retry=retry, final=how == "final"))
        if again:
            assert sample.state is WAITING
            suspect = self.losses[name] >= SUSPECT
            assert self.plan.start(suspect=suspect) is sample, "a retried sample goes first"
            self.begin_running(sample)
        else:
            assert sample.state is LOST

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sample_is_stale_again_and_again(self, data: st.DataObject) -> None:
        """Its group is postponed in the end, or it is lost."""
        sample = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        alive = self.staleness is not None and sample.group.state is RUNNING
        while alive:
            self.observed(lambda: self.plan.failed(sample, STALE, retry=False))
            alive = sample.state is WAITING
            if alive:
                suspect = self.losses[self.name(sample)] >= SUSPECT
                assert self.plan.start(suspect=suspect) is sample
                self.begin_running(sample)
                self.running.pop()
        if sample.state is RUNNING:
            self.running.append(sample)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def what_runs_a_sample_is_lost(self, data: st.DataObject) -> None:
        sample = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        losses, tries = self.losses[self.name(sample)], sample.tries
        may = losses < MAX_LOSSES and sample.group.state is RUNNING
        assert self.plan.interrupted(sample) == may
        if may:
            self.losses[self.name(sample)] = losses + 1
            self.runs[self.name(sample)] -= 1
            self.running.remove(sample)
            assert (sample.state, sample.tries) == (WAITING, tries)
        else:
            group, alive = sample.group, sample.group.state is RUNNING
            self.running.remove(sample)
            self.plan.condemned(sample, "error")
            assert sample.state is LOST
            assert group.state is DROPPED or (group.state is POSTPONED and not alive)
            if alive:
                self.condemned.add(group)

    @rule(name=st.sampled_from([MODEL, *ADAPTERS]))
    def new_weights(self, name: str) -> None:
        if name in self.versions:
            self.since[name] += name in self.used
        self.versions[name] = self.versions.get(name, -1) + 1
        self.observed(lambda: self.plan.advance(dict(self.versions)))

    @rule(n=st.integers(0, 6))
    def a_consumer_waits(self, n: int) -> None:
        self.wanted = self.plan.wanted = n

    @rule()
    def take_a_group(self) -> None:
        def rank(group: Group) -> tuple[int, int]:
            oldest = oldest_of(s.oldest for s in group.done)
            return -age(self.versions, oldest), self.order.index(group)

        ready = [g for g in self.order if g.state is READY]
        group = self.plan.take()
        assert group is min(ready, key=rank, default=None)
        if group is None:
            return
        self.steps += max(self.since.values(), default=0)
        self.since.clear()
        assert group.state is TAKEN
        assert not any(self.too_old(s.oldest) for s in group.done)
        assert len(group.done) >= self.min_group
        self.taken.append(group)

    @rule()
    def look_at_one_that_has_lost_samples(self) -> None:
        lessened = self.lessened()
        group = self.plan.next_lessened()
        if group is None:
            assert not lessened
        else:
            assert group in lessened
            assert self.plan.next_lessened() is group
            self.plan.keep(group)
            self.counted[group] = len(group.done)

    def lessened(self) -> list[Group]:
        ready = [g for g in self.order if g.state is READY]
        return [g for g in ready if len(g.done) < self.counted[g]]

    @rule(data=st.data())
    def filter_a_group(self, data: st.DataObject) -> None:
        ready = [g for g in self.order if g.state is READY]
        if ready:
            group = ready[data.draw(st.integers(0, len(ready) - 1))]
            self.plan.filter(group)
            assert group.state is FILTERED
            self.filtered += 1

    @rule()
    def the_data_set_ends(self) -> None:
        """Exhaust the data set for a moment. The run is over if nothing is left."""
        plan = self.plan
        plan.exhausted = True
        live = [g for g in self.groups if g.state in (RUNNING, READY)]
        assert plan.over == (not live and not plan.again and not plan.late)
        assert plan.ending == (
            all(g.state is READY for g in live) and not plan.again and not plan.late
        )
        if plan.may_begin() and not plan.again:
            others = [g for g in live if g.state is RUNNING and not g.late]
            may = bool(plan.late) and not others
            late = plan.begin_again()
            assert (late is not None) == may
            if late is not None:
                assert late.late
                self.groups.append(late)
                self.check_begun_again(late)
        plan.exhausted = False

    @invariant()
    def it_adds_up(self) -> None:
        plan = self.plan
        plan.validate()
        assert set(plan.lessened) == set(self.lessened())
        assert plan.running == len(self.running)
        assert plan.taken == len(self.taken)
        assert plan.filtered == self.filtered
        done = [s for g in self.groups for s in g.samples if s.state is DONE]
        assert plan.samples_done == len(done)
        lost = [s for g in self.groups for s in g.samples if s.state is LOST]
        assert sum(plan.lost.values()) == len(lost) + self.stale_again
        assert max(self.stale.values(), default=0) <= 2 * MOST_STALE
        if self.staleness is not None:
            live_done = [s for g in plan.live for s in g.done]
            assert not any(self.too_old(s.oldest) for s in live_done)
        # Every item that was begun has exactly one outcome.
        by_item: dict[int, list[Group]] = {}
        for group in self.groups:
            by_item.setdefault(group.index, []).append(group)
        pending = [one.number for one in (*plan.again, *plan.late)]
        unfinished = []
        dropped = 0
        for index, groups in by_item.items():
            failed = [g.state is DROPPED for g in groups]
            assert [g.tries for g in groups] == [sum(failed[:i]) for i in range(len(groups))]
            assert all(g.state in (DROPPED, POSTPONED) for g in groups[:-1])
            assert sum(g.state is POSTPONED for g in groups) <= 1
            assert sum(failed) <= self.retries + 1
            last = groups[-1].state
            if last is DROPPED and index not in pending:
                assert (
                    sum(failed) == self.retries + 1
                    or groups[-1] in self.condemned
                    or len(self.may_run_again(index)) < self.min_group
                )
                dropped += 1
            elif last not in (TAKEN, FILTERED):
                assert last in (RUNNING, READY) or index in pending
                unfinished.append(index)
        assert plan.dropped == dropped
        assert plan.unfinished() == sorted(unfinished)


PlanMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPlan = PlanMachine.TestCase


def started(plan: Plan, count: int) -> list[Sample]:
    samples = []
    for _ in range(count):
        sample = plan.start()
        assert sample is not None
        samples.append(sample)
    return samples


@given(st.integers(1, 8), st.integers(1, 40), st.randoms(use_true_random=False))
def test_begun_groups_are_finished_first(size: int, at_a_time: int, draw: random.Random) -> None:
    """Samples end in any order. A group begins only if every sample of older groups was started."""
    plan = Plan(group_size=size, most_ready=1000)
    running: list[Sample] = []
    for _ in range(100):
        while len(running) < at_a_time:
            sample = plan.start()
            if sample is None:
                assert not any(s.state is WAITING for g in plan.live for s in g.samples)
                plan.begin(plan.next_index, None)
            else:
                running.append(sample)
        begun = [group for group in plan.live if group.state is RUNNING]
        newest = max(begun, key=lambda group: group.index)
        unstarted = {s.group for g in begun for s in g.samples if s.state is WAITING}
        assert unstarted <= {newest}
        assert len(begun) <= at_a_time
        plan.done(running.pop(draw.randrange(len(running))), None, model(0))


def test_synchronous_training_begins_one_batch_for_each_version() -> None:
    plan = Plan(batch_size=2, max_staleness=0)
    for index in range(2):
        plan.begin(index, None)
    assert not plan.may_begin()
    for sample in started(plan, 2):
        plan.done(sample, "result", model(0))
    assert plan.take() is not None
    assert plan.take() is not None
    assert not plan.may_begin(), "the batch is taken, but the weights are still the old ones"
    plan.advance(model(1))
    assert plan.may_begin()


def test_samples_whose_tokens_are_too_old_run_again_at_once() -> None:
    plan = Plan(group_size=3, min_group=2, batch_size=1, max_staleness=1, retries=0)
    group = plan.begin(0, "item")
    plan.begin(1, "another item")
    first, second, straggler = started(plan, 3)
    plan.done(first, "a", model(0))
    plan.done(second, "b", model(1))
    plan.advance(model(1))
    assert not plan.is_stale(straggler, model(0))
    plan.advance(model(2))
    assert plan.is_stale(straggler, model(0))
    assert not plan.is_stale(straggler, model(1))
    assert not plan.is_stale(straggler, {}), "it has not sampled anything yet"
    assert plan.failed(straggler, STALE, retry=False) is None
    # The first sample is too old as well. Both run before the samples of the next item.
    assert {*started(plan, 2)} == {first, straggler}
    assert (group.state, plan.lost, plan.dropped) == (RUNNING, {STALE: 2}, 0)
    plan.done(first, "c", model(2))
    assert plan.done(straggler, "d", model(2)) is group
    assert [s.result for s in group.done] == ["c", "b", "d"]


def test_an_item_that_is_too_slow_waits_for_the_end_of_the_data_set() -> None:
    plan = Plan(batch_size=1, max_staleness=0, retries=0)
    plan.begin(0, "slow")
    for version in range(1, MOST_STALE + 1):
        (sample,) = started(plan, 1)
        plan.advance(model(version))
        assert plan.is_stale(sample, model(version - 1))
        plan.failed(sample, STALE, retry=False)
    assert [*plan.too_slow] == [TooSlow(0, lost=False)]
    assert (plan.begin_again(), plan.unfinished(), plan.dropped) == (None, [0], 0)
    quick = plan.begin(1, "quick")
    plan.exhausted = True
    assert plan.begin_again() is None, "another item is sampled"
    (sample,) = started(plan, 1)
    plan.done(sample, "result", model(MOST_STALE))
    late = plan.begin_again()
    assert late is not None
    assert (late.item, late.samples[0].tries, plan.ending) == ("slow", 0, False)
    assert plan.take() is quick
    # The trainer makes new weights without groups. The run ends nevertheless.
    for version in range(MOST_STALE + 1, 2 * MOST_STALE + 1):
        (sample,) = started(plan, 1)
        plan.advance(model(version))
        plan.failed(sample, STALE, retry=False)
    assert plan.over
    assert (plan.dropped, plan.dropped_stale) == (1, 1)
    assert plan.too_slow[-1] == TooSlow(0, lost=True)


@pytest.mark.parametrize("updated", [["x"], ["x", "y"], [MODEL, "x"], ["x", "other"]])
def test_new_versions_of_adapters_are_steps(updated: list[str]) -> None:
    """However many policies a step updates, it is one step. Other runs' adapters do not count."""
    now = {MODEL: 0, "x": 5, "y": 0, "other": 9}
    plan = Plan(batch_size=1, max_staleness=1, versions=now)
    for step in range(4):
        while plan.may_begin():
            plan.begin(plan.next_index, None)
        assert plan.next_index == step + 2
        for sample in iter(plan.start, None):
            plan.done(sample, "result", {name: now[name] for name in (MODEL, "x", "y")})
        assert plan.take() is not None
        for name in updated:
            now = {**now, name: now[name] + 1}
            plan.advance(now)
        for _ in range(3):
            now = {**now, "other": now["other"] + 1}
            plan.advance(now)


def test_alternate_updates_of_adapters_are_steps() -> None:
    now = {MODEL: 0, "x": 0, "y": 0}
    plan = Plan(batch_size=1, max_staleness=0, versions=now)
    for step in range(6):
        assert plan.may_begin()
        plan.begin(step, None)
        (sample,) = started(plan, 1)
        name = "xy"[step % 2]
        plan.done(sample, "result", {MODEL: 0, name: now[name]})
        assert plan.take() is not None
        assert plan.needs_weights()
        now = {**now, name: now[name] + 1}
        plan.advance(now)


def test_the_age_of_a_token_of_an_adapter_is_the_larger_one() -> None:
    plan = Plan(batch_size=1, max_staleness=1, versions={MODEL: 3, "x": 8})
    plan.begin(0, None)
    (sample,) = started(plan, 1)
    for oldest in ({MODEL: 1, "x": 8}, {MODEL: 3, "x": 6}):
        assert plan.is_stale(sample, oldest)
    assert not plan.is_stale(sample, {MODEL: 2, "x": 7, "unknown": 0})


@pytest.mark.parametrize("seed", range(5))
def test_no_more_groups_are_ready_than_may_be(seed: int) -> None:
    """Samples of all groups end in any order, often at the same time."""
    draw = random.Random(seed)
    plan = Plan(group_size=2, ahead=8)
    running: list[Sample] = []
    most = 0
    for _ in range(2000):
        while len(running) < 64 and ((sample := plan.start()) is not None or plan.may_begin()):
            if sample is None:
                plan.begin(plan.next_index, None)
            else:
                running.append(sample)
        draw.shuffle(running)
        for _ in range(draw.randrange(len(running) + 1)):
            plan.done(running.pop(), None, model(0))
        most = max(most, len(plan.ready))
        for _ in range(draw.choice([0, 0, 1, 9])):
            plan.take()
    assert most == 8


def test_what_runs_for_a_group_that_was_given_up_is_stale() -> None:
    plan = Plan(group_size=2, min_group=2, retries=0)
    plan.begin(0, "item")
    bad, good = started(plan, 2)
    plan.failed(bad, "error", retry=False)
    assert plan.is_stale(good, {})
    assert plan.done(good, "result", model(0)) is None
    assert (plan.dropped, plan.samples_done, plan.running) == (1, 0, 0)


@pytest.mark.parametrize("taken", [True, False])
def test_groups_that_wait_to_be_taken_hold_back_new_ones(taken: bool) -> None:
    plan = Plan(ahead=1)
    plan.begin(0, None)
    assert not plan.may_begin(), "it may become ready before another one is taken"
    (sample,) = started(plan, 1)
    plan.done(sample, "result", model(0))
    if taken:
        plan.take()
    assert plan.may_begin() == taken


@pytest.mark.parametrize("retries", [0, 1, 2])
@pytest.mark.parametrize("min_group", [1, 2, 8])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_no_sample_is_run_more_often_than_it_may(
    retries: int, min_group: int, share: float
) -> None:
    """Run 300 items of 8, 64 samples at a time. ``share`` of the attempts fail, weights change."""
    draws = random.Random(0)
    plan = Plan(group_size=8, min_group=min_group, retries=retries, batch_size=300, max_staleness=1)
    attempts: Counter[tuple[int, int]] = Counter()
    running: list[Sample] = []
    while not plan.over:
        while len(running) < 64:
            sample = plan.start()
            if sample is not None:
                attempts[sample.group.index, sample.index] += 1
                running.append(sample)
            elif not plan.may_begin() or (plan.begin_again() is None and plan.next_index == 300):
                break
            elif plan.next_index < 300 and not plan.waiting:
                plan.begin(plan.next_index, None)
        plan.exhausted = plan.next_index == 300
        for _ in range(draws.randrange(len(running) + 1)):
            sample = running.pop(draws.randrange(len(running)))
            if draws.random() < share:
                plan.failed(sample, "error", retry=draws.random() < 0.9)
            else:
                plan.done(sample, "result", model(plan.version - draws.randrange(2)))
        if draws.random() < 0.2:
            plan.advance(model(plan.version + 1))
        while plan.take() is not None:
            pass
    assert len(attempts) <= 2400
    # A run whose tokens became too old does not count.
    assert max(attempts.values()) <= 1 + retries + 2 * MOST_STALE


def test_a_group_is_begun_again_with_the_tries_that_are_left() -> None:
    plan = Plan(group_size=3, min_group=2, retries=1)
    plan.begin(0, "item")
    tired, unlucky, _ = started(plan, 3)
    plan.failed(tired, "error", retry=True)
    (tired,) = started(plan, 1)
    plan.failed(tired, "error", retry=True)
    plan.failed(unlucky, "timeout", retry=False)
    again = plan.begin_again()
    assert again is not None
    assert [(s.index, s.tries) for s in again.samples] == [(1, 1), (2, 1)]
    unlucky, _ = started(plan, 2)
    plan.failed(unlucky, "timeout", retry=False)
    assert (plan.begin_again(), plan.dropped) == (None, 1)


def test_what_no_other_run_would_change_is_not_run_again() -> None:
    plan = Plan(group_size=1, retries=2)
    plan.begin(0, "item")
    (sample,) = started(plan, 1)
    plan.failed(sample, "error", retry=False, final=True)
    assert (plan.begin_again(), plan.dropped) == (None, 1)
