"""Weight updates, each test one sequence of events. See also ``test_weight_losses``.

Any order of events: ``test_weight_states``.
"""

from __future__ import annotations

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
    Member,
)
from sglrl.errors import InvalidWeights, SettingsMismatch

from .stepped_update import (
    A0,
    A1,
    B0,
    B1,
    NO,
    PHASES,
    RANKS,
    Update,
    ask,
    end,
    in_order,
)

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
