"""Two models of ``sglrl.core.weight_update``.

``Model`` computes the effects that an event must have, with flags that are only ever set and one
table that reads them. ``Witness`` does not know these rules. It watches a pool of ranks from
outside, as they get messages, answer and die. It checks rules that hold for all effects: the order
of phases, which rank has which version, and which ranks are in a group together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sglrl.core.weight_update import (
    ABORT,
    COMMIT,
    DONE,
    FAILED,
    JOIN,
    PREPARE,
    SENDER,
    STAGE,
    Ask,
    Effect,
    Ended,
    Expel,
    Limits,
    Member,
    WeightUpdate,
)

ORDER = [JOIN, PREPARE, STAGE, COMMIT]
WITH_SENDER = {JOIN, STAGE, ABORT}


@dataclass
class Model:
    """Computes effects. ``follow`` returns the effects after a flag was set, as ``plain`` does."""

    live: set[Member]
    sender: bool
    joined: bool
    join_only: bool
    limits: Limits
    now: float
    deadline: float = 0.0
    phase: str = ""
    unanswered: set[Member] = field(default_factory=set)
    blamed: list[Member] = field(default_factory=list)
    """The member of each error that must be reported."""
    attempts: int = 0
    strays: int = 0
    short_of_a_worker: bool = False
    broken: bool = False
    refused: bool = False
    cancelled: bool = False
    sender_gone: bool = False
    dirty: set[int] = field(default_factory=set)
    effects: list[object] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.phase in (DONE, FAILED)

    # --- events -----------------------------------------------------------------------------------

    def answer(self, member: Member, phase: str, *, error: bool, dirty: bool) -> None:
        if phase != self.phase or member not in self.unanswered:
            self.strays += 1
            return
        self.unanswered.remove(member)
        if dirty:
            self.dirty.add(member[0])
        if not error:
            return
        self.blamed.append(member)
        if phase == PREPARE:
            self.refused = True
        elif phase in (JOIN, STAGE):
            self.broken = True
        elif member == SENDER:
            self.lose_sender()
        else:
            self.expel(member[0])

    def lose(self, worker: int) -> None:
        gone = {m for m in self.live if m[0] == worker}
        if gone and not self.ended:
            self.live -= gone
            self.unanswered -= gone
            self.short_of_a_worker = True
            self.joined = False

    def lose_sender(self) -> bool:
        """Lose the sender. Return whether this changes anything."""
        if self.ended or not self.sender or self.sender_gone:
            return False
        self.sender_gone = True
        self.joined = False
        self.unanswered.discard(SENDER)
        return True

    def cancel(self) -> bool:
        self.cancelled |= self.phase != COMMIT and not self.ended
        return self.phase != COMMIT and not self.ended

    def tick(self) -> None:
        if self.ended or self.now < self.deadline:
            return
        if self.phase in ORDER[:3]:
            self.blamed.append(min(self.unanswered))
            self.broken = True
            return
        for worker in sorted({worker for worker, _ in self.unanswered if worker != SENDER[0]}):
            self.expel(worker)
        if SENDER in self.unanswered:
            self.lose_sender()
            self.blamed.append(SENDER)

    def expel(self, worker: int) -> None:
        self.effects.append(("expel", worker))
        self.lose(worker)

    # --- effects ----------------------------------------------------------------------------------

    def follow(self) -> list[object]:
        while not self.ended and self.decide():
            pass
        effects, self.effects = self.effects, []
        return effects

    def decide(self) -> bool:
        """Take the next step, if there is one. Return whether there was one."""
        unwanted = self.cancelled or self.refused or self.sender_gone
        if self.phase == "":
            if not self.live:
                self.end(FAILED)
            elif self.join_only and (self.joined or not self.sender):
                self.end(DONE)
            else:
                self.attempt()
        elif self.phase in ORDER[:3] and (
            self.cancelled
            or self.sender_gone
            or self.short_of_a_worker
            or self.broken
            or (self.refused and not self.unanswered)
        ):
            self.ask(ABORT)
        elif self.unanswered:
            return False
        elif self.phase == ABORT:
            if self.short_of_a_worker and self.live and not unwanted:
                self.blamed.clear()
                self.attempt()
            else:
                for worker in sorted(self.dirty & {worker for worker, _ in self.live}):
                    self.expel(worker)
                self.end(FAILED)
        elif self.phase == COMMIT:
            self.end(DONE if self.live else FAILED)
        elif self.phase == JOIN and self.join_only:
            self.joined = True
            self.end(DONE)
        else:
            self.joined = self.sender
            self.ask(ORDER[ORDER.index(self.phase) + 1])
        return True

    def attempt(self) -> None:
        self.attempts += 1
        self.broken = self.short_of_a_worker = False
        self.ask(JOIN if self.sender and not self.joined else PREPARE)

    def ask(self, phase: str) -> None:
        self.phase = phase
        self.unanswered = set(self.live)
        if self.sender and not self.sender_gone and phase in WITH_SENDER:
            self.unanswered.add(SENDER)
        if phase in (JOIN, STAGE):
            self.joined = False
        limits = {COMMIT: self.limits.commit, ABORT: self.limits.abort}
        self.deadline = self.now + limits.get(phase, self.limits.phase)
        if self.unanswered:
            self.effects.append(("ask", phase, frozenset(self.unanswered)))

    def end(self, state: str) -> None:
        self.phase = state
        if state == DONE:
            why = ""
        elif self.cancelled:
            why = "cancelled"
        elif self.sender_gone or not self.live:
            why = "lost"
        else:
            why = "refused" if self.refused else "broken"
        self.effects.append(("end", state, why, list(self.blamed)))


def plain(effects: Iterable[Effect]) -> list[object]:
    """Return effects as the model shows them: all asks of one phase are one set."""
    shown: list[object] = []
    asked: dict[str, set[Member]] = {}
    for effect in effects:
        if isinstance(effect, Ask):
            last = shown[-1] if shown else None
            if not (isinstance(last, tuple) and last[0] == "ask" and last[1] == effect.phase):
                asked[effect.phase] = set()
            assert effect.member not in asked[effect.phase], "asked twice"
            if asked[effect.phase]:
                shown.pop()
            asked[effect.phase].add(effect.member)
            shown.append(("ask", effect.phase, frozenset(asked[effect.phase])))
        elif isinstance(effect, Expel):
            assert effect.reason
            shown.append(("expel", effect.worker))
        else:
            blamed = [member for member, _ in effect.errors]
            shown.append(("end", effect.state, effect.why, blamed))
    return shown


class Witness:
    """Watches a pool through several updates, one after the other.

    Attributes:
        versions: the version of every live rank. None: only some of its weights are new.
    """

    def __init__(self, members: Iterable[Member]) -> None:
        self.versions: dict[Member, int | None] = dict.fromkeys(members, 0)
        self.version = 0
        self.sender = self.sender_here = False
        self.group: set[Member] = set()
        """The members that formed a group with the current sender."""
        self.under_way = False
        """Whether a member may be in a collective of that group."""
        self.leaving = False
        """Whether the members of the group were told to leave it."""

    @property
    def live(self) -> set[Member]:
        return set(self.versions)

    @property
    def whole(self) -> bool:
        """Whether the sender and all live ranks, and no others, form an idle group."""
        return self.group == self.live and bool(self.group) and not self.under_way

    def begin(self, *, sender: bool, join_only: bool) -> None:
        self.sender = self.sender_here = sender
        self.join_only = join_only
        self.said: dict[str, set[Member]] = {}
        self.asked: dict[str, set[Member]] = {}
        self.staging: set[Member] = set()
        """The members that were asked to STAGE in any attempt. Their weights may be half new."""
        self.may_retry = False
        self.must_not_retry = False
        self.ended = False

    def everybody(self, phase: str) -> set[Member]:
        return self.live | ({SENDER} if self.sender_here and phase in WITH_SENDER else set())

    # --- events -----------------------------------------------------------------------------------

    def answered(self, member: Member, phase: str, *, error: bool, dirty: bool) -> None:
        """Record an answer to a message."""
        self.must_not_retry |= phase == PREPARE and error
        if member in self.versions:
            if dirty:
                self.versions[member] = None
            elif phase == COMMIT and not error:
                self.versions[member] = self.version + 1
        if error:
            return
        said = self.said.setdefault(phase, set())
        said.add(member)
        complete = self.everybody(phase) == said == self.asked[phase]
        if phase == JOIN and complete:
            self.group = self.live
            self.under_way = False
        elif phase == STAGE and complete:
            self.under_way = False

    def died(self, worker: int) -> None:
        for member in [m for m in self.versions if m[0] == worker]:
            del self.versions[member]
        self.may_retry = True

    def sender_died(self) -> None:
        self.sender_here = False
        self.must_not_retry |= self.sender
        self.group = set()

    def cancelled(self) -> None:
        self.must_not_retry = True

    # --- effects ----------------------------------------------------------------------------------

    def judge(self, effects: Iterable[Effect], machine: WeightUpdate) -> None:
        for effect in effects:
            assert not self.ended, "something happens after the end"
            match effect:
                case Ask(phase, member):
                    self.judge_ask(phase, member, machine)
                case Expel(worker, _):
                    assert worker in {w for w, _ in self.versions}, "expelled, but not a member"
                    self.died(worker)
                case Ended(state, why, _):
                    self.ended = True
                    self.judge_end(state, why, machine)

    def judge_ask(self, phase: str, member: Member, machine: WeightUpdate) -> None:
        if phase in (JOIN, PREPARE) and ABORT in self.asked:
            assert self.may_retry, "another attempt, and no worker was lost"
            assert not self.must_not_retry, "another attempt, and nobody wants it"
            assert self.live <= self.said[ABORT], "another attempt while the last one goes on"
            self.said.clear()
            self.asked.clear()
            self.may_retry = False
        assert member in self.everybody(phase), f"{member} cannot be asked to {phase}"
        asked = self.asked.setdefault(phase, set())
        assert member not in asked, "asked twice in one attempt"
        asked.add(member)
        assert ABORT not in self.asked or phase == ABORT
        assert COMMIT not in self.asked or phase == COMMIT, "after COMMIT nothing is asked"
        match phase:
            case "join":
                assert self.sender
                self.group = set()
                self.leaving = False
                self.under_way = True
            case "prepare" if self.sender:
                assert self.whole, "no group to receive from"
            case "stage":
                assert self.said.get(PREPARE) == self.live, "STAGE before all are prepared"
                self.under_way = self.sender
                self.staging.add(member)
            case "commit":
                assert self.said.get(STAGE) == self.everybody(STAGE), "COMMIT before all staged"
                assert self.said.get(PREPARE) == self.live
            case "abort":
                if self.under_way:
                    assert machine.leave, "a collective may go on for ever"
                assert self.sender or not machine.leave, "there is no group to leave"
                self.leaving |= machine.leave

    def judge_end(self, state: str, why: str, machine: WeightUpdate) -> None:
        if self.leaving:
            self.group = set()
            self.leaving = self.under_way = False
        new = state == DONE and not self.join_only
        if new:
            self.version += 1
        assert (why == "") == (state == DONE)
        assert state == FAILED or self.live, "DONE, and there is nobody"
        assert set(self.versions.values()) <= {self.version}, "versions differ"
        assert machine.members == self.live
        assert machine.workers == {worker for worker, _ in self.live}
        if self.sender:
            assert not machine.joined or self.whole, "joined, but not with these members"
        if state == DONE and self.sender_here and self.asked.get(COMMIT, self.live) == self.live:
            assert machine.joined, "the group is whole, and would be formed again"
