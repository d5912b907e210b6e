"""Weight updates in which a member is lost or silent. Each test is one sequence of events."""

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
)
from sglrl.errors import WeightUpdateError

from .stepped_update import (
    A0,
    A1,
    B0,
    B1,
    BEFORE_COMMIT,
    NO,
    PHASES,
    RANKS,
    Update,
    ask,
    end,
    in_order,
)

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


def test_a_worker_is_lost_while_another_reports_the_failure() -> None:
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
    """A group that was formed before the update has lost a member, too."""
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
    hint = "; can the workers connect to the sender's host=?" if phase == "join" else ""
    assert str(error) == f"no answer to '{phase}' within the time-out from rank 0 of worker 1{hint}"
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
