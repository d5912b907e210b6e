"""Weight updates, each test one sequence of events. Any order: ``test_weight_states``."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sglrl.core.weight_update import (
    ABORT,
    COMMIT,
    DONE,
    FAILED,
    JOIN,
    PREPARE,
    SENDER,
    STAGE,
    Ended,
    Expel,
    Limits,
    Member,
    WeightUpdate,
)
from sglrl.errors import InvalidWeights, SettingsMismatch, SglrlError, WeightUpdateError

from .update_model import plain

A0, A1, B0, B1 = (0, 0), (0, 1), (1, 0), (1, 1)
RANKS = [A0, A1, B0, B1]
LIMITS = Limits(phase=10.0, commit=20.0, abort=5.0)
PHASES = [JOIN, PREPARE, STAGE, COMMIT]
BEFORE_COMMIT = [(False, JOIN), *((j, phase) for j in (False, True) for phase in (PREPARE, STAGE))]
"""Whether the group was joined before the update, and a phase that exists in this case."""
NO = WeightUpdateError("no")


class Update:
    """A machine with a clock. Its methods return the machine's new effects."""

    def __init__(
        self,
        members: Iterable[Member] = RANKS,
        *,
        joined: bool = False,
        sender: bool = True,
        join_only: bool = False,
        until: str = "",
    ) -> None:
        """Begin an update.

        Args:
            until: the phase that is in progress. All members answered well in the phases before.
        """
        self.now = 100.0
        self.machine = WeightUpdate(
            members,
            joined=joined,
            sender=sender,
            limits=LIMITS,
            now=self.now,
            join_only=join_only,
        )
        while until and self.machine.state != until:
            self.all_answer()
        self.ended: Ended | None = None
        if until:
            self.effects()

    def effects(self) -> list[object]:
        """Return the effects since the last call. Errors are in ``ended``."""
        found, self.machine.outbox = self.machine.outbox, []
        self.ended = next((e for e in found if isinstance(e, Ended)), None)
        self.expelled = {e.worker: e.reason for e in found if isinstance(e, Expel)}
        return [e[:3] if isinstance(e, tuple) else e for e in plain(found)]

    def answer(
        self, *members: Member, error: SglrlError | None = None, dirty: bool = False
    ) -> list[object]:
        for member in members:
            self.machine.answered(member, self.machine.state, error, self.now, dirty)
        return self.effects()

    def all_answer(self) -> None:
        for member in sorted(self.machine.waiting):
            self.machine.answered(member, self.machine.state, None, self.now)

    def time_out(self) -> list[object]:
        """Let the time-out pass. Nothing may happen before it."""
        self.now = self.machine.deadline - 0.25
        self.machine.tick(self.now)
        assert self.effects() == []
        self.now = self.machine.deadline
        self.machine.tick(self.now)
        return self.effects()

    def lose(self, worker: int) -> list[object]:
        self.machine.lost(worker, self.now)
        return self.effects()

    def finish(self) -> list[object]:
        """Answer well for all members until the end."""
        found = self.effects()
        while not self.machine.ended:
            self.all_answer()
            found += self.effects()
        return found


def ask(phase: str, *members: Member) -> object:
    return ("ask", phase, frozenset(members))


def end(state: str, why: str = "") -> object:
    return ("end", state, why)


def in_order(*members: Member) -> list[object]:
    return [
        ask(JOIN, *members, SENDER),
        ask(PREPARE, *members),
        ask(STAGE, *members, SENDER),
        ask(COMMIT, *members),
        end(DONE),
    ]


# --- success --------------------------------------------------------------------------------------


def test_the_four_phases() -> None:
    update = Update()
    assert update.finish() == in_order(*RANKS)
    assert update.machine.joined
    assert update.machine.attempts == 1
    assert update.machine.errors == []


def test_who_is_joined_is_not_asked_to_join() -> None:
    update = Update(joined=True)
    assert update.finish() == in_order(*RANKS)[1:]
    assert update.machine.joined


def test_without_a_sender_nobody_joins() -> None:
    update = Update(sender=False)
    assert update.finish() == [
        ask(PREPARE, *RANKS),
        ask(STAGE, *RANKS),
        ask(COMMIT, *RANKS),
        end(DONE),
    ]
    assert not update.machine.joined


@pytest.mark.parametrize("phase", [PREPARE, STAGE])
def test_without_a_sender_there_is_no_group_to_leave(phase: str) -> None:
    update = Update(sender=False, joined=True, until=phase)
    update.machine.cancel(update.now)
    assert update.effects() == [ask(ABORT, *RANKS)]
    assert not update.machine.leave
    assert update.finish() == [end(FAILED, "cancelled")]
    assert not update.machine.joined


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_begins_with_the_last_answer_to_the_one_before(phase: str) -> None:
    update = Update(until=phase)
    *first, last = sorted(update.machine.waiting)
    assert update.answer(*first) == []
    assert update.answer(*first) == []
    assert update.machine.late_answers == len(first)
    assert len(update.answer(last)) == 1


@pytest.mark.parametrize(
    ("phase", "seconds"), [(JOIN, 10.0), (PREPARE, 10.0), (STAGE, 10.0), (COMMIT, 20.0)]
)
def test_every_phase_has_its_own_time(phase: str, seconds: float) -> None:
    update = Update(until=phase)
    assert update.machine.deadline == 100.0 + seconds
    if phase != COMMIT:
        update.machine.cancel(200.0)
        assert update.machine.deadline == 205.0


def test_join_only() -> None:
    update = Update(join_only=True)
    assert update.finish() == [ask(JOIN, *RANKS, SENDER), end(DONE)]
    assert update.machine.joined


@pytest.mark.parametrize(("joined", "sender"), [(True, True), (False, False)])
def test_join_only_with_nothing_to_join(joined: bool, sender: bool) -> None:
    update = Update(join_only=True, joined=joined, sender=sender)
    assert update.effects() == [end(DONE)]
    assert update.machine.joined is joined


@pytest.mark.parametrize("sender", [True, False])
def test_with_nobody_to_update(sender: bool) -> None:
    update = Update([], sender=sender)
    assert update.effects() == [end(FAILED, "lost")]
    assert update.machine.cancel(0.0) is False


# --- a member refuses -----------------------------------------------------------------------------


def test_a_refusal_is_final_and_the_first_of_the_errors() -> None:
    update = Update(until=PREPARE)
    refusal = InvalidWeights("there is no such tensor")
    assert update.answer(A1, error=refusal) == []
    assert update.answer(B0, B1) == []
    assert update.answer(A0, error=NO) == [ask(ABORT, *RANKS, SENDER)]
    assert not update.machine.leave
    assert update.finish() == [end(FAILED, "refused")]
    assert update.machine.joined
    assert update.ended is not None
    assert update.ended.errors == [(A1, refusal), (A0, NO)]


def test_a_refusal_and_a_silent_worker() -> None:
    """The update is refused all the same. There is no other attempt."""
    update = Update(until=PREPARE)
    update.answer(A0, error=NO)
    assert update.time_out() == [ask(ABORT, *RANKS, SENDER)]
    assert update.answer(SENDER, A0, A1) == []
    assert update.time_out() == [("expel", 1), end(FAILED, "refused")]
    assert update.ended is not None
    assert update.ended.errors[0] == (A0, NO)
    assert not update.machine.joined


@pytest.mark.parametrize("phase", [JOIN, STAGE])
@pytest.mark.parametrize("who", [SENDER, B1])
def test_an_error_in_a_collective_ends_it_for_all_at_once(phase: str, who: Member) -> None:
    update = Update(until=phase)
    error = SettingsMismatch("torch")
    assert update.answer(A0) == []
    assert update.answer(who, error=error) == [ask(ABORT, *RANKS, SENDER)]
    assert update.machine.leave
    assert update.answer(SENDER, A0, A1, B0) == []
    assert update.answer(B1) == [end(FAILED, "broken")]
    assert update.ended is not None
    assert update.ended.errors == [(who, error)]
    assert not update.machine.joined
    assert update.machine.members == set(RANKS)


def test_who_cannot_commit_is_expelled_and_the_others_go_on() -> None:
    update = Update(until=COMMIT)
    assert update.answer(B0, error=NO) == [("expel", 1)]
    assert "commit" in update.expelled[1]
    assert update.answer(B1) == []
    assert update.answer(A0, A1) == [end(DONE)]
    assert update.machine.workers == {0}
    assert not update.machine.joined, "worker 1 was in the group"


def test_nobody_can_commit() -> None:
    update = Update(until=COMMIT)
    assert update.answer(B0, error=NO) == [("expel", 1)]
    assert update.answer(A1, error=NO) == [("expel", 0), end(FAILED, "lost")]


def test_who_cannot_abort_is_expelled() -> None:
    """It is unknown whether the worker still has the old weights."""
    update = Update(until=STAGE)
    update.machine.cancel(update.now)
    update.effects()
    assert update.answer(A0, error=NO) == [("expel", 0)]
    assert update.answer(SENDER, B0, B1) == [end(FAILED, "cancelled")]


def test_a_sender_that_cannot_abort_has_no_second_attempt() -> None:
    update = Update(until=STAGE)
    update.lose(0)
    assert update.answer(SENDER, error=NO) == []
    assert update.answer(B0, B1) == [end(FAILED, "lost")]


# --- a member is lost -----------------------------------------------------------------------------


@pytest.mark.parametrize(("joined", "phase"), BEFORE_COMMIT)
def test_a_worker_is_lost_before_commit(joined: bool, phase: str) -> None:
    """The other workers get the update, in a group of their own."""
    update = Update(joined=joined, until=phase)
    update.answer(A0)
    assert update.lose(1) == [ask(ABORT, A0, A1, SENDER)]
    assert update.machine.leave
    assert update.finish() == in_order(A0, A1)
    assert update.machine.attempts == 2
    assert update.machine.joined
    assert update.machine.errors == []


def test_a_worker_is_lost_while_its_neighbour_reports_the_broken_collective() -> None:
    """The result does not depend on which of the two events is noticed first."""
    update = Update(until=STAGE)
    assert update.answer(A0, error=NO) == [ask(ABORT, *RANKS, SENDER)]
    assert update.answer(SENDER, A0, A1) == []
    assert update.lose(1) == in_order(A0, A1)[:1]
    assert update.finish() == in_order(A0, A1)[1:]
    assert update.machine.errors == [], "those of an attempt that was made up for"


def test_a_worker_is_lost_in_commit() -> None:
    update = Update(until=COMMIT)
    assert update.answer(A0, A1, B0) == []
    assert update.lose(1) == [end(DONE)]
    assert update.machine.workers == {0}
    assert not update.machine.joined


@pytest.mark.parametrize("joined", [True, False])
def test_a_worker_is_lost_after_a_refusal(joined: bool) -> None:
    """A group that was formed before the update is no longer whole either."""
    update = Update(joined=joined, until=PREPARE)
    update.answer(A0, error=NO)
    update.answer(A1, B0, B1)
    assert update.answer(SENDER, A0, A1) == []
    assert update.lose(1) == [end(FAILED, "refused")]
    assert not update.machine.joined


def test_without_a_sender_the_others_begin_again_with_prepare() -> None:
    update = Update(sender=False, until=STAGE)
    assert update.lose(0) == [ask(ABORT, B0, B1)]
    assert update.answer(B0, B1) == [ask(PREPARE, B0, B1)]


@pytest.mark.parametrize("phase", PHASES)
def test_all_workers_are_lost(phase: str) -> None:
    update = Update(until=phase)
    first = [] if phase == COMMIT else [ask(ABORT, B0, B1, SENDER)]
    assert update.lose(0) == first
    assert update.lose(0) == []
    if phase == COMMIT:
        assert update.lose(1) == [end(FAILED, "lost")]
        return
    assert update.lose(1) == []
    assert update.answer(SENDER) == [end(FAILED, "lost")]
    assert update.machine.attempts == 1


def test_the_only_worker_is_lost() -> None:
    update = Update([A0], until=PREPARE)
    assert update.lose(0) == [ask(ABORT, SENDER)]
    assert update.answer(SENDER) == [end(FAILED, "lost")]
    alone = Update([A0], sender=False)
    assert alone.effects() == [ask(PREPARE, A0)]
    assert alone.lose(0) == [end(FAILED, "lost")]


def test_another_attempt_has_to_have_a_reason_of_its_own() -> None:
    update = Update(until=STAGE)
    update.lose(1)
    assert update.answer(SENDER, A0, A1) == [ask(JOIN, A0, A1, SENDER)]
    assert update.answer(A0, error=NO) == [ask(ABORT, A0, A1, SENDER)]
    assert update.finish() == [end(FAILED, "broken")]
    assert update.machine.attempts == 2


def test_workers_are_lost_one_attempt_after_the_other() -> None:
    update = Update([(worker, 0) for worker in range(4)])
    for left in (3, 2, 1):
        update.effects()
        for _ in PHASES[: left - 1]:
            update.all_answer()
        update.lose(left)
        update.all_answer()
    assert update.finish() == in_order((0, 0))
    assert update.machine.attempts == 4


def test_strangers_are_not_missed() -> None:
    update = Update(until=STAGE)
    assert update.lose(7) == []
    assert update.answer((7, 0)) == []
    assert update.answer((0, 2), error=NO) == []
    assert update.machine.late_answers == 2


@pytest.mark.parametrize("phase", [JOIN, PREPARE, STAGE])
def test_the_sender_is_lost_before_commit(phase: str) -> None:
    update = Update(until=phase)
    gone = WeightUpdateError("the sender is gone")
    update.machine.lost_sender(gone, update.now)
    assert update.effects() == [ask(ABORT, *RANKS)]
    assert update.machine.leave
    update.machine.lost_sender(NO, update.now)
    assert update.answer(*RANKS) == [end(FAILED, "lost")]
    assert update.ended is not None
    assert update.ended.errors == [(SENDER, gone)]


def test_the_sender_is_lost_in_commit() -> None:
    """The update does not need the sender any more, but the sender's group is lost."""
    update = Update(until=COMMIT)
    update.machine.lost_sender(NO, update.now)
    assert update.finish() == [end(DONE)]
    assert not update.machine.joined


def test_the_sender_is_lost_as_the_last_of_those_who_abort() -> None:
    update = Update(until=STAGE)
    update.lose(0)
    update.answer(B0, B1)
    update.machine.lost_sender(NO, update.now)
    assert update.effects() == [end(FAILED, "lost")]


def test_there_was_no_sender_to_lose() -> None:
    update = Update(sender=False, until=STAGE)
    update.machine.lost_sender(NO, update.now)
    assert update.finish() == [ask(COMMIT, *RANKS), end(DONE)]


# --- a member is silent ---------------------------------------------------------------------------


@pytest.mark.parametrize(("joined", "phase"), BEFORE_COMMIT)
def test_a_silent_worker_is_out(joined: bool, phase: str) -> None:
    """A late worker may just wait for another. A worker that cannot even abort is expelled."""
    update = Update(joined=joined, until=phase)
    update.answer(A0, A1, SENDER)
    assert update.time_out() == [ask(ABORT, *RANKS, SENDER)]
    assert update.machine.leave is (phase != PREPARE)
    assert update.answer(SENDER, A0, A1, B1) == []
    assert update.time_out() == [("expel", 1), ask(JOIN, A0, A1, SENDER)]
    assert "abort" in update.expelled[1]
    assert update.finish() == in_order(A0, A1)[1:]


@pytest.mark.parametrize("phase", [JOIN, PREPARE, STAGE])
def test_a_slow_worker_that_aborts_is_kept(phase: str) -> None:
    update = Update(until=phase)
    update.answer(A0, A1, SENDER, B1)
    update.time_out()
    assert update.answer(SENDER, *RANKS) == [end(FAILED, "broken")]
    assert update.ended is not None
    ((member, error),) = update.ended.errors
    assert member == B0
    assert str(error) == f"no answer to '{phase}' within the time-out from rank 0 of worker 1"
    assert update.machine.joined is (phase == PREPARE)


def test_a_silent_worker_in_commit() -> None:
    update = Update(until=COMMIT)
    assert update.answer(A0, A1, B1) == []
    assert update.time_out() == [("expel", 1), end(DONE)]
    assert "commit" in update.expelled[1]


@pytest.mark.parametrize("phase", [JOIN, STAGE])
def test_a_silent_sender(phase: str) -> None:
    update = Update(until=phase)
    update.answer(*RANKS)
    assert update.time_out() == [ask(ABORT, *RANKS, SENDER)]
    assert update.answer(*RANKS) == []
    assert update.time_out() == [end(FAILED, "lost")]
    assert update.ended is not None
    assert [(m, str(e)) for m, e in update.ended.errors] == [
        (SENDER, f"no answer to '{phase}' within the time-out from the sender"),
        (SENDER, "the sender does not answer"),
    ]
    assert not update.machine.joined


@pytest.mark.parametrize("phase", PHASES)
def test_all_are_silent(phase: str) -> None:
    update = Update(until=phase)
    if phase != COMMIT:
        assert update.time_out() == [ask(ABORT, *RANKS, SENDER)]
    assert update.time_out() == [("expel", 0), ("expel", 1), end(FAILED, "lost")]


# --- the update is cancelled ----------------------------------------------------------------------


@pytest.mark.parametrize("phase", [JOIN, PREPARE, STAGE])
def test_cancelled_before_commit(phase: str) -> None:
    update = Update(until=phase)
    assert update.machine.cancel(update.now) is True
    assert update.effects() == [ask(ABORT, *RANKS, SENDER)]
    assert update.machine.leave is (phase != PREPARE)
    assert update.machine.cancel(update.now) is True
    assert update.finish() == [end(FAILED, "cancelled")]
    assert update.machine.cancel(update.now) is False
    assert update.machine.joined is (phase == PREPARE)


def test_too_late_to_cancel() -> None:
    update = Update(until=COMMIT)
    assert update.machine.cancel(update.now) is False
    assert update.finish() == [end(DONE)]
    assert update.machine.cancel(update.now) is False
    assert update.effects() == []


def test_cancelled_while_another_attempt_was_to_be_made() -> None:
    update = Update(until=STAGE)
    update.lose(1)
    assert update.machine.cancel(update.now) is True
    assert update.answer(SENDER, A0, A1) == [end(FAILED, "cancelled")]


# --- half of the weights are new ------------------------------------------------------------------


def test_who_is_half_new_is_expelled_when_the_update_fails() -> None:
    update = Update(until=STAGE)
    update.machine.cancel(update.now)
    update.effects()
    assert update.answer(A1, dirty=True) == []
    assert update.answer(SENDER, A0, B0, B1) == [("expel", 0), end(FAILED, "cancelled")]
    assert update.machine.members == {B0, B1}
    assert update.expelled[0] == "a weight update was given up when half of its weights were new"


def test_all_are_half_new() -> None:
    update = Update(until=STAGE)
    assert update.answer(SENDER, error=NO) == [ask(ABORT, *RANKS, SENDER)]
    assert update.answer(*RANKS, dirty=True) == []
    assert update.answer(SENDER) == [("expel", 0), ("expel", 1), end(FAILED, "lost")]


def test_who_is_half_new_is_made_whole_by_another_attempt() -> None:
    update = Update(until=STAGE)
    update.lose(1)
    update.answer(A0, A1, dirty=True)
    assert update.answer(SENDER) == [ask(JOIN, A0, A1, SENDER)]
    assert update.finish() == in_order(A0, A1)[1:]


def test_half_new_in_an_attempt_before_the_last() -> None:
    """No later attempt has made the worker's weights whole."""
    update = Update(until=STAGE)
    update.lose(1)
    update.answer(A0, dirty=True)
    update.answer(A1, SENDER)
    update.machine.cancel(update.now)
    update.effects()
    assert update.answer(A0, A1, SENDER) == [("expel", 0), end(FAILED, "cancelled")]


# --- events after the end -------------------------------------------------------------------------


def test_nothing_happens_after_the_end() -> None:
    update = Update()
    update.finish()
    assert update.answer(*RANKS, SENDER, error=NO) == []
    assert update.lose(0) == []
    update.machine.lost_sender(NO, update.now)
    update.machine.tick(1e9)
    assert update.effects() == []
    assert update.machine.state == DONE
    assert update.machine.members == set(RANKS)
    assert update.machine.errors == []


@pytest.mark.parametrize("phase", [JOIN, PREPARE, STAGE])
def test_answers_to_what_was_given_up_are_late(phase: str) -> None:
    update = Update(until=phase)
    update.machine.cancel(update.now)
    for member in RANKS:
        update.machine.answered(member, phase, NO, update.now, dirty=True)
    assert update.machine.late_answers == 4
    assert update.machine.waiting == {SENDER, *RANKS}
    assert update.machine.dirty == set()
    assert update.machine.errors == []
