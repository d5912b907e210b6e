"""Run weight updates on one pool, one after the other, with any order of events."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglrl.core.weight_update import (
    ABORT,
    COMMIT,
    DONE,
    FAILED,
    JOIN,
    PREPARE,
    SENDER,
    STAGE,
    Limits,
    Member,
    WeightUpdate,
)
from sglrl.errors import WeightUpdateError

from .update_model import Model, Witness, plain

pick = st.integers(0, 1 << 16)
"""Chooses one of the objects that exist at the moment, modulo their number."""

rarely = st.sampled_from([False, False, False, True])
"""Events that end an update must be rare, or few updates would get beyond JOIN."""

LIMITS = Limits(phase=10.0, commit=20.0, abort=5.0)
STRANGER: Member = (9, 0)


class UpdateStates(RuleBasedStateMachine):
    @initialize(
        ranks=st.lists(st.integers(1, 3), min_size=1, max_size=4),
        sender=st.sampled_from([True, True, True, False]),
        join_only=rarely,
    )
    def begin(self, ranks: list[int], sender: bool, join_only: bool) -> None:
        self.now = 0.0
        self.ranks = ranks
        self.witness = Witness((w, rank) for w, n in enumerate(ranks) for rank in range(n))
        self.group: frozenset[Member] = frozenset()
        """The members that are joined with the sender, as the machines report."""
        self.start(sender, join_only)

    @property
    def running(self) -> bool:
        return hasattr(self, "model") and not self.model.ended

    def start(self, sender: bool, join_only: bool) -> None:
        members = self.witness.live
        joined = sender and bool(members) and self.group == members
        self.witness.begin(sender=sender, join_only=join_only)
        self.model = Model(set(members), sender, joined, join_only, LIMITS, self.now)
        self.machine = WeightUpdate(
            sorted(members),
            joined=joined,
            sender=sender,
            limits=LIMITS,
            now=self.now,
            join_only=join_only,
        )
        self.judge()

    def judge(self) -> None:
        effects, self.machine.outbox = self.machine.outbox, []
        assert plain(effects) == self.model.follow()
        self.witness.judge(effects, self.machine)
        if self.machine.ended and effects and self.machine.sender:
            self.group = frozenset(self.machine.members if self.machine.joined else ())

    # --- answers ----------------------------------------------------------------------------------

    def answer(self, member: Member, *, error: bool = False, dirty: bool = False) -> None:
        phase = self.model.phase
        dirty = dirty and phase == ABORT and member in self.witness.staging - {SENDER}
        self.witness.answered(member, phase, error=error, dirty=dirty)
        if error and member == SENDER and phase == ABORT:
            self.witness.sender_died()
        self.model.answer(member, phase, error=error, dirty=dirty)
        failure = WeightUpdateError("no") if error else None
        self.machine.answered(member, phase, failure, self.now, dirty)
        self.judge()

    def all_answer(self) -> None:
        """Answer for all members in this phase. The last answer begins the next phase."""
        for member in sorted(self.model.unanswered):
            self.answer(member)

    @precondition(lambda self: self.running)
    @rule(n=pick, dirty=st.booleans())
    def one_answers(self, n: int, dirty: bool) -> None:
        waiting = sorted(self.model.unanswered)
        self.answer(waiting[n % len(waiting)], dirty=dirty)

    @precondition(lambda self: self.running)
    @rule(n=pick, left_out=st.sampled_from([0, 0, 0, 1, 2]))
    def phase_goes_well(self, n: int, left_out: int) -> None:
        """Answer well for all members, or for nearly all."""
        waiting = sorted(self.model.unanswered)
        at = n % len(waiting)
        for member in (waiting[at:] + waiting[:at])[left_out:]:
            self.answer(member)

    @precondition(lambda self: self.running)
    @rule(n=pick, really=rarely, dirty=st.booleans())
    def one_cannot(self, n: int, really: bool, dirty: bool) -> None:
        if really:
            waiting = sorted(self.model.unanswered)
            self.answer(waiting[n % len(waiting)], error=True, dirty=dirty)

    @precondition(lambda self: self.running)
    @rule(really=rarely)
    def all_goes_well(self, really: bool) -> None:
        if not really:
            return
        phases = 0
        while self.running:
            self.all_answer()
            phases += 1
            # In the worst case: the abort of this attempt, and another attempt.
            assert phases <= 5

    @rule(
        n=pick,
        phase=st.sampled_from([JOIN, PREPARE, STAGE, COMMIT, ABORT, DONE, FAILED, "", "sing"]),
        error=st.booleans(),
        dirty=st.booleans(),
    )
    def stray_answer(self, n: int, phase: str, error: bool, dirty: bool) -> None:
        """Answer twice, too late, in another phase, or for a member without a message."""
        known = [(w, rank) for w, n in enumerate(self.ranks) for rank in range(n)]
        members = [*known, SENDER, STRANGER]
        member = members[n % len(members)]
        if phase == self.model.phase and member in self.model.unanswered:
            return
        self.model.answer(member, phase, error=error, dirty=dirty)
        failure = WeightUpdateError("no") if error else None
        self.machine.answered(member, phase, failure, self.now, dirty)
        self.judge()

    # --- ends -------------------------------------------------------------------------------------

    @rule(worker=st.integers(0, 4), really=rarely)
    def lose_worker(self, worker: int, really: bool) -> None:
        if really:
            self.witness.died(worker)
            self.model.lose(worker)
            self.machine.lost(worker, self.now)
            self.judge()

    @rule(really=rarely)
    def lose_sender(self, really: bool) -> None:
        if not really:
            return
        if self.model.lose_sender():
            self.model.blamed.append(SENDER)
        self.witness.sender_died()
        self.machine.lost_sender(WeightUpdateError("gone"), self.now)
        self.judge()
        # The next update has its own sender.
        self.group = frozenset()

    @precondition(lambda self: self.running)
    @rule(really=rarely)
    def cancel(self, really: bool) -> None:
        if really or self.model.phase == COMMIT:
            wanted = self.model.cancel()
            if wanted:
                self.witness.cancelled()
            assert self.machine.cancel(self.now) is wanted
            self.judge()

    @rule(seconds=st.integers(0, 12))
    def tick(self, seconds: int) -> None:
        self.now += seconds
        self.time_passes()

    def time_passes(self) -> None:
        self.model.now = self.now
        late = self.model.phase == ABORT and SENDER in self.model.unanswered
        self.model.tick()
        if late and SENDER not in self.model.unanswered:
            self.witness.sender_died()
        self.machine.tick(self.now)
        self.judge()

    # --- the next update --------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "model") and self.model.ended)
    @rule(sender=st.sampled_from([True, True, True, False]), join_only=rarely)
    def another(self, sender: bool, join_only: bool) -> None:
        assert self.machine.cancel(self.now) is False
        self.start(sender, join_only)

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        machine, model = self.machine, self.model
        assert machine.state == model.phase
        assert machine.ended is model.ended
        assert machine.attempts == model.attempts
        assert machine.late_answers == model.strays
        if not model.ended:
            assert machine.members == model.live
            assert machine.waiting == model.unanswered != set()
            assert machine.deadline == model.deadline
            assert machine.leave is (model.sender and not model.joined)

    def teardown(self) -> None:
        """Let all timeouts pass without answers. The update must end all the same."""
        if not hasattr(self, "model"):
            return
        timeouts = 0
        while self.running:
            self.now = self.machine.deadline
            self.time_passes()
            timeouts += 1
            # One timeout of the ABORT in progress, and two of the attempt without that member.
            assert timeouts <= 3


TestUpdateStates = UpdateStates.TestCase
TestUpdateStates.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
