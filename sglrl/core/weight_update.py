"""The life of one weight update: who is asked what, and what an answer, a loss or silence means.

::

    JOIN ──▶ PREPARE ──▶ STAGE ──▶ COMMIT ──▶ DONE
      │         │          │
      └─────────┴──────────┴──▶ ABORT ──▶ FAILED, or JOIN again without the worker that was lost

Two phases: until COMMIT nothing that serves has changed, and COMMIT begins only when every rank of
every worker has all of the new weights. From then on the update cannot fail: a worker that cannot
commit is expelled (its process is ended), and the others have the new version.

Invariants: the update ends exactly once. A rank is asked to STAGE only after all said yes to
PREPARE, and to COMMIT only after all have staged. When it has ended, every worker that was not
expelled has one and the same version: the new one if it is DONE, else the old one.

A member is ``(worker, rank)``; the sender of the weights is ``SENDER``. With ``sender=False``
(weights from files) there is no group, so no JOIN and no sender.

An answer says which phase it is of, not which attempt: what still comes of an attempt that was
given up is for the caller to drop, by the ids of its messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from ..errors import SglrlError, WeightUpdateError

Member = tuple[int, int]
SENDER: Final[Member] = (-1, 0)

JOIN: Final = "join"
PREPARE: Final = "prepare"
STAGE: Final = "stage"
COMMIT: Final = "commit"
ABORT: Final = "abort"
DONE: Final = "done"
FAILED: Final = "failed"

_NEXT: Final = {JOIN: PREPARE, PREPARE: STAGE, STAGE: COMMIT, COMMIT: DONE}


class Ask(NamedTuple):
    """Send ``phase``'s message to ``member``, which answers once."""

    phase: str
    member: Member


class Expel(NamedTuple):
    """End the worker's processes; it is not a member any more."""

    worker: int
    reason: str


class Ended(NamedTuple):
    """``state`` is DONE or FAILED. why: "" when DONE, else "refused" (a rank said no to PREPARE),
    "cancelled", "lost" (no worker is left, or the sender is gone) or "broken"."""

    state: str
    why: str
    errors: list[tuple[Member, SglrlError]]


Effect = Ask | Expel | Ended


class Limits(NamedTuple):
    """Seconds that any member may take: for JOIN, STAGE and, if ``prepare`` is None, PREPARE; for
    COMMIT; and for ABORT. PREPARE may await running requests."""

    phase: float
    commit: float
    abort: float
    prepare: float | None = None


class WeightUpdate:
    """One update's state machine. Methods mutate it and append to ``outbox``.

    Args:
        members: every rank of every worker that takes part.
        joined: the sender and exactly these members already form a group. Afterwards the attribute
            says so of the sender and the members that are left.
        sender: there is one.
        join_only: form the group ahead of time, and no more.
    """

    def __init__(
        self,
        members: Iterable[Member],
        *,
        joined: bool,
        sender: bool,
        limits: Limits,
        now: float,
        join_only: bool = False,
    ) -> None:
        self.members = set(members)
        self.sender = sender
        self.join_only = join_only
        self.limits = limits
        self.outbox: list[Effect] = []
        self.waiting: set[Member] = set()
        self.errors: list[tuple[Member, SglrlError]] = []
        self.dirty: set[int] = set()
        self.attempts = 0
        self.joined = joined and sender
        self.cancelled = False
        self.sender_lost = False
        self.refused = False
        self.late_answers = 0
        self._lost_some = False
        self.state = ""
        self.deadline = now
        if not self.members:
            self._enter(FAILED, now)
        elif join_only and (joined or not sender):
            self._enter(DONE, now)
        else:
            self._begin(now)

    @property
    def workers(self) -> set[int]:
        return {worker for worker, _ in self.members}

    @property
    def ended(self) -> bool:
        return self.state in (DONE, FAILED)

    @property
    def leave(self) -> bool:
        """Whether an abort must take the group down: a collective may be under way in it."""
        return self.sender and not self.joined

    # --- events -----------------------------------------------------------------------------------

    def answered(
        self, member: Member, phase: str, error: SglrlError | None, now: float, dirty: bool = False
    ) -> None:
        """``dirty``: the answer to ABORT of a rank whose live weights are half new."""
        if phase != self.state or member not in self.waiting:
            self.late_answers += 1
            return
        self.waiting.discard(member)
        if dirty:
            self.dirty.add(member[0])
        if error is not None:
            self.errors.append((member, error))
            if member == SENDER and phase == ABORT:
                self._without_sender()
            elif phase in (COMMIT, ABORT):
                # What it has now is not known.
                self._expel(member[0], f"it could not {phase}: {error}")
            elif phase == PREPARE:
                self.refused = True
            elif phase in (JOIN, STAGE):
                # The others wait in a collective for what will not come.
                self._enter(ABORT, now)
                return
        self._advance(now)

    def lost(self, worker: int, now: float) -> None:
        """All processes of the worker are gone."""
        if self.ended or worker not in self.workers:
            return
        self._remove(worker)
        if self.state in (ABORT, COMMIT):
            self._advance(now)
        else:
            self._enter(ABORT, now)

    def lost_sender(self, error: SglrlError, now: float) -> None:
        if self.ended or not self.sender or self.sender_lost:
            return
        self._without_sender()
        self.errors.append((SENDER, error))
        if self.state in (ABORT, COMMIT):
            self._advance(now)
        else:
            self._enter(ABORT, now)

    def cancel(self, now: float) -> bool:
        """The caller no longer wants it. False when it is too late: it has ended, or will be DONE
        if a worker is left."""
        if self.state == COMMIT or self.ended:
            return False
        self.cancelled = True
        if self.state != ABORT:
            self._enter(ABORT, now)
        return True

    def tick(self, now: float) -> None:
        """The deadline has passed. Until COMMIT whoever is late may only be waiting for another, in
        a collective, so all are told to abort, which a live process answers at once: who does
        not is out."""
        if self.ended or now < self.deadline:
            return
        if self.state not in (ABORT, COMMIT):
            late = ", ".join(map(_name, sorted(self.waiting)))
            error = WeightUpdateError(
                f"no answer to {self.state!r} within the time-out from {late}"
            )
            self.errors.append((min(self.waiting), error))
            self._enter(ABORT, now)
            return
        for worker in sorted({worker for worker, _ in self.waiting if worker >= 0}):
            self._expel(worker, f"it did not answer to {self.state!r} of a weight update in time")
        if SENDER in self.waiting:
            self._without_sender()
            self.errors.append((SENDER, WeightUpdateError("the sender does not answer")))
        self._advance(now)

    # --- inside -----------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        self.attempts += 1
        self._lost_some = False
        self._enter(JOIN if self.sender and not self.joined else PREPARE, now)

    def _enter(self, state: str, now: float) -> None:
        self.state = state
        if state in (DONE, FAILED):
            self.outbox.append(Ended(state, "" if state == DONE else self._why(), self.errors))
            return
        asked = sorted(self.members)
        if self.sender and not self.sender_lost and state in (JOIN, STAGE, ABORT):
            # Last: a sender in this process begins at once, and takes the interpreter from whoever
            # would still ask the others.
            asked.append(SENDER)
        if state == STAGE:
            # Until they have all staged, the group may be in the middle of a collective.
            self.joined = False
        elif state == COMMIT:
            self.joined = self.sender
        self.waiting = set(asked)
        limits = self.limits
        limit = {COMMIT: limits.commit, ABORT: limits.abort, PREPARE: limits.prepare}.get(state)
        self.deadline = now + (limits.phase if limit is None else limit)
        self.outbox.extend(Ask(state, member) for member in asked)
        if not asked:
            self._advance(now)

    def _advance(self, now: float) -> None:
        if self.waiting or self.ended:
            return
        if self.state == ABORT:
            self._aborted(now)
        elif self.state == COMMIT:
            self._enter(DONE if self.members else FAILED, now)
        elif self.refused or not self.members:
            self._enter(ABORT, now)
        else:
            if self.state == JOIN:
                self.joined = True
                if self.join_only:
                    self._enter(DONE, now)
                    return
            self._enter(_NEXT[self.state], now)

    def _aborted(self, now: float) -> None:
        again = self._lost_some and not (self.cancelled or self.sender_lost or self.refused)
        if again and self.members:
            self.errors.clear()
            self._begin(now)
            return
        for worker in sorted(self.dirty & self.workers):
            self._expel(worker, "a weight update was given up when half of its weights were new")
        self._enter(FAILED, now)

    def _why(self) -> str:
        if self.cancelled:
            return "cancelled"
        if self.sender_lost or not self.members:
            return "lost"
        return "refused" if self.refused else "broken"

    def _expel(self, worker: int, reason: str) -> None:
        self.outbox.append(Expel(worker, reason))
        self._remove(worker)

    def _without_sender(self) -> None:
        self.sender_lost = True
        self.joined = False
        self.waiting.discard(SENDER)

    def _remove(self, worker: int) -> None:
        self._lost_some = True
        # Its ranks were in the group.
        self.joined = False
        gone = {member for member in self.members if member[0] == worker}
        self.members -= gone
        self.waiting -= gone


def _name(member: Member) -> str:
    return "the sender" if member == SENDER else f"rank {member[1]} of worker {member[0]}"
