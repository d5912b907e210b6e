"""The plan of a run, compared with a model that records everything and searches its records."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglrl.core.rollout_plan import (
    DONE,
    DROPPED,
    FILTERED,
    GIVEN_UP,
    LOST,
    MOST_LOSSES,
    READY,
    RUNNING,
    STALE,
    SUSPECT,
    TAKEN,
    WAITING,
    Group,
    Plan,
    Sample,
)


class PlanMachine(RuleBasedStateMachine):
    """Random events for a plan, compared with the groups and samples that the model records."""

    @initialize(
        group_size=st.integers(1, 4),
        short=st.integers(0, 3),
        retries=st.integers(0, 2),
        batch_size=st.integers(1, 3),
        staleness=st.none() | st.integers(0, 2),
        ahead=st.integers(1, 4),
        version=st.integers(0, 5),
    )
    def begin_run(
        self,
        group_size: int,
        short: int,
        retries: int,
        batch_size: int,
        staleness: int | None,
        ahead: int,
        version: int,
    ) -> None:
        self.group_size = group_size
        self.min_group = max(1, group_size - short)
        self.retries = retries
        self.batch_size = batch_size
        self.staleness = staleness
        self.ahead = ahead
        self.first = version
        self.plan = Plan(
            group_size=group_size,
            min_group=self.min_group,
            retries=retries,
            batch_size=batch_size,
            max_staleness=staleness,
            ahead=ahead,
            version=version,
        )
        self.version = version
        self.groups: list[Group] = []
        self.running: list[Sample] = []
        self.order: list[Group] = []
        self.taken: list[Group] = []
        self.filtered = 0
        self.runs: Counter[tuple[int, int]] = Counter()
        """Runs of each sample of each item, except runs whose process was lost."""
        self.losses: Counter[tuple[int, int]] = Counter()
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

    def too_old(self, version: int) -> bool:
        return self.staleness is not None and version < self.version - self.staleness

    def note_ready(self, group: Group | None) -> None:
        if group is not None:
            assert group.state is READY
            assert group not in self.order
            self.order.append(group)
            self.counted[group] = len(group.done)

    @rule()
    def begin_a_group(self) -> None:
        live = [g for g in self.groups if g.state in (RUNNING, READY)]
        waiting_to_be_taken = [g for g in live if g.state is READY]
        may = len(waiting_to_be_taken) < self.ahead
        if self.staleness is not None:
            # AReaL, equation 3, counted over the groups taken and the groups in progress.
            begun = len(self.taken) + len(live)
            steps = self.version - self.first
            may = may and begun < (steps + self.staleness + 1) * self.batch_size
        assert self.plan.may_begin() == may
        if may:
            again = self.plan.begin_again()
            if again is None:
                index = len({g.index for g in self.groups})
                again = self.plan.begin(index, f"item {index}")
                assert [s.index for s in again.samples] == [*range(self.group_size)]
            else:
                assert [s.index for s in again.samples] == self.may_run_again(again.index)
                assert len(again.samples) >= self.min_group
            assert all(s.tries == self.runs[self.name(s)] for s in again.samples)
            assert all(s.losses == self.losses[self.name(s)] for s in again.samples)
            assert again.item == f"item {again.index}"
            self.groups.append(again)

    @rule(suspect=st.booleans())
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

    @precondition(lambda self: self.running)
    @rule(data=st.data(), age=st.integers(0, 3))
    def a_sample_ends_well(self, data: st.DataObject, age: int) -> None:
        sample = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        oldest = max(0, self.version - age)
        alive = sample.group.state is RUNNING
        ready = self.plan.done(sample, object(), oldest)
        if not alive or self.too_old(oldest):
            assert sample.state is LOST
            assert sample.result is None
        else:
            assert sample.state is DONE
        self.note_ready(ready)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["retry", "lose", "final"]))
    def a_sample_fails(self, data: st.DataObject, how: str) -> None:
        sample = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
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
    def what_runs_a_sample_is_lost(self, data: st.DataObject) -> None:
        sample = self.running[data.draw(st.integers(0, len(self.running) - 1))]
        losses, tries = self.losses[self.name(sample)], sample.tries
        may = losses < MOST_LOSSES and sample.group.state is RUNNING
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
            assert (sample.state, group.state) == (LOST, DROPPED)
            if alive:
                self.condemned.add(group)

    @rule()
    def new_weights(self) -> None:
        self.version += 1
        self.plan.advance(self.version)

    @rule()
    def take_a_group(self) -> None:
        def fresh(group: Group) -> list[Sample]:
            return [s for s in group.samples if s.state is DONE and not self.too_old(s.oldest)]

        ready = [g for g in self.order if g.state is READY]
        eligible = [g for g in ready if len(fresh(g)) >= self.min_group]
        # Samples that are too old are removed first. So the groups' ages come from fresh samples.
        expected = min(
            eligible,
            key=lambda g: (min(s.oldest for s in fresh(g)), self.order.index(g)),
            default=None,
        )
        group = self.plan.take()
        assert group is expected
        if group is None:
            return
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
        self.plan.exhausted = True
        live = [g for g in self.groups if g.state in (RUNNING, READY)]
        assert self.plan.over == (not live and not self.plan.again)
        self.plan.exhausted = False

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
        assert sum(plan.lost.values()) == len(lost)
        # Every item that was begun has exactly one outcome.
        by_item: dict[int, list[Group]] = {}
        for group in self.groups:
            by_item.setdefault(group.index, []).append(group)
        pending = [index for index, *_ in plan.again]
        unfinished = []
        dropped = 0
        for index, groups in by_item.items():
            assert [g.tries for g in groups] == [*range(len(groups))]
            assert len(groups) <= self.retries + 1
            assert all(g.state is DROPPED for g in groups[:-1])
            last = groups[-1].state
            if last is DROPPED and index not in pending:
                assert (
                    len(groups) == self.retries + 1
                    or groups[-1] in self.condemned
                    or len(self.may_run_again(index)) < self.min_group
                )
                dropped += 1
            elif last not in (TAKEN, FILTERED):
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
    plan = Plan(group_size=size, ahead=1000)
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
        plan.done(running.pop(draw.randrange(len(running))), None, 0)


def test_synchronous_training_begins_one_batch_for_each_version() -> None:
    plan = Plan(batch_size=2, max_staleness=0, ahead=9)
    for index in range(2):
        plan.begin(index, None)
    assert not plan.may_begin()
    for sample in started(plan, 2):
        plan.done(sample, "result", 0)
    assert plan.take() is not None
    assert plan.take() is not None
    assert not plan.may_begin(), "the batch is taken, but the weights are still the old ones"
    plan.advance(1)
    assert plan.may_begin()


def test_a_straggler_is_of_no_use_when_its_tokens_are_too_old() -> None:
    plan = Plan(group_size=3, min_group=2, batch_size=1, max_staleness=1)
    group = plan.begin(0, "item")
    first, second, straggler = started(plan, 3)
    plan.done(first, "a", 0)
    plan.done(second, "b", 1)
    plan.advance(1)
    assert not plan.is_stale(straggler, 0)
    plan.advance(2)
    assert plan.is_stale(straggler, 0)
    assert not plan.is_stale(straggler, 1)
    assert not plan.is_stale(straggler, None), "it has not sampled anything yet"
    assert plan.failed(straggler, STALE, retry=False) is None
    # By now the first sample is too old as well, and one sample is no group.
    assert group.state is DROPPED
    assert plan.lost == {STALE: 2, GIVEN_UP: 1}
    again = plan.begin_again()
    assert again is not None
    assert (again.index, again.item, again.tries) == (0, "item", 1)


def test_what_runs_for_a_group_that_was_given_up_is_stale() -> None:
    plan = Plan(group_size=2, min_group=2, retries=0)
    plan.begin(0, "item")
    bad, good = started(plan, 2)
    plan.failed(bad, "error", retry=False)
    assert plan.is_stale(good, None)
    assert plan.done(good, "result", 0) is None
    assert (plan.dropped, plan.samples_done, plan.running) == (1, 0, 0)


@pytest.mark.parametrize("taken", [True, False])
def test_groups_that_wait_to_be_taken_hold_back_new_ones(taken: bool) -> None:
    plan = Plan(ahead=1)
    plan.begin(0, None)
    (sample,) = started(plan, 1)
    plan.done(sample, "result", 0)
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
    plan = Plan(
        group_size=8, min_group=min_group, retries=retries, batch_size=300, max_staleness=1, ahead=9
    )
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
                plan.done(sample, "result", plan.version - draws.randrange(2))
        if draws.random() < 0.2:
            plan.advance(plan.version + 1)
        while plan.take() is not None:
            pass
    assert len(attempts) <= 2400
    assert max(attempts.values()) <= 1 + retries


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
