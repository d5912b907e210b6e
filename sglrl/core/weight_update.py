"""The state machine of one weight update: the messages to send, and the reactions to events.

::

    JOIN ──▶ PREPARE ──▶ STAGE ──▶ COMMIT ──▶ DONE
      │         │          │
      └─────────┴──────────┴──▶ ABORT ──▶ FAILED, or JOIN again without the lost worker

The update is a two-phase commit. Before COMMIT the live weights do not change. COMMIT begins only
when every rank of every worker has all of the new weights. From then on the update cannot fail: a
worker that cannot commit is expelled (its process is killed), and the other workers have the new
version.

Invariants of the machine:

* The update ends exactly once.
* A rank gets STAGE only after all ranks have accepted PREPARE. It gets COMMIT only after all ranks
  have staged.
* After the end, all workers that were not expelled have the same version. This is the new version
  if the update is DONE, and the old version otherwise.

A member is ``(worker, rank)``. The sender of the weights is ``SENDER``. In JOIN, the sender and the
members form a group for collectives. With ``sender=False`` (weights from files) there is neither a
sender nor a group, and the update begins with PREPARE.

An answer contains its phase, but not its attempt. The caller must drop late answers to an abandoned
attempt, by the ids of their messages.
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
    """Send the message of ``phase`` to ``member``, which answers once."""

    phase: str
    member: Member


class Expel(NamedTuple):
    """Kill the processes of a worker, which is no longer a member."""

    worker: int
    reason: str


class Ended(NamedTuple):
    """The end of the update.

    Attributes:
        state: DONE or FAILED.
        why: the reason of a failure: "refused" if a rank rejected PREPARE, "cancelled", "lost" if
            no worker is left or the sender is lost, or "broken". Empty if DONE.
        errors: the errors of the members.
    """

    state: str
    why: str
    errors: list[tuple[Member, SglrlError]]


Effect = Ask | Expel | Ended


class Limits(NamedTuple):
    """The time limits of each member, in seconds.

    Attributes:
        phase: limit for JOIN and STAGE, and for PREPARE if ``prepare`` is None.
        commit: limit for COMMIT.
        abort: limit for ABORT.
        prepare: limit for PREPARE, which may wait for running requests.
    """

    phase: float
    commit: float
    abort: float
    prepare: float | None = None


class WeightUpdate:
    """The state machine of one update. Methods mutate it and append effects to ``outbox``.

    Args:
        members: every rank of every worker that takes part.
        joined: whether the sender and exactly these members already form a group. The attribute of
            the same name later applies to the sender and the remaining members.
        sender: whether the update has a sender.
        join_only: whether to only form the group, before the first update.
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
        """Whether an abort must destroy the group, because a collective may be running in it."""
        return self.sender and not self.joined

    # --- events -----------------------------------------------------------------------------------

    def answered(
        self, member: Member, phase: str, error: SglrlError | None, now: float, dirty: bool = False
    ) -> None:
        """Process the answer of a member.

        Args:
            dirty: whether some live weights of the rank are new and the others are old. Only an
                answer to ABORT reports this.
        """
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
                # The state of the weights of this rank is unknown now.
                self._expel(member[0], f"it could not {phase}: {error}")
            elif phase == PREPARE:
                self.refused = True
            elif phase in (JOIN, STAGE):
                # The other members wait in a collective that cannot finish.
                self._enter(ABORT, now)
                return
        self._advance(now)

    def lost(self, worker: int, now: float) -> None:
        """Remove a worker whose processes have all exited. Before COMMIT, abort the attempt."""
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
        """Cancel the update for the caller.

        Returns:
            False if it is too late, because the update has ended or is in COMMIT.
        """
        if self.state == COMMIT or self.ended:
            return False
        self.cancelled = True
        if self.state != ABORT:
            self._enter(ABORT, now)
        return True

    def tick(self, now: float) -> None:
        """Handle a passed deadline.

        Before COMMIT, a late member may be healthy and wait in a collective for another member. So
        the update sends ABORT to all members, and a live process answers ABORT at once. A worker
        that does not answer ABORT or COMMIT in time is expelled. A sender that does not answer
        ABORT in time counts as lost.
        """
        if self.ended or now < self.deadline:
            return
        if self.state not in (ABORT, COMMIT):
            late = ", ".join(map(_name, sorted(self.waiting)))
            hint = ""
            if self.state == JOIN and self.waiting != {SENDER}:
                hint = "; can the workers connect to the sender's host=?"
            if self.state == PREPARE and self.limits.prepare is not None:
                hint = (
                    f"; running requests had drain_timeout={self.limits.prepare:g} seconds to "
                    "finish, and in a paused or sleeping engine they do not"
                )
            error = WeightUpdateError(
                f"no answer to {self.state!r} within the time-out from {late}{hint}"
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
            # Put the sender last, because a sender in this process begins at once, and then keeps
            # the interpreter busy while the other members still need their messages.
            asked.append(SENDER)
        if state == STAGE:
            # Until all members have staged, a collective may be running in the group.
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
        # The group contained the ranks of this worker, so it cannot be used any more.
        self.joined = False
        gone = {member for member in self.members if member[0] == worker}
        self.members -= gone
        self.waiting -= gone


def _name(member: Member) -> str:
    return "the sender" if member == SENDER else f"rank {member[1]} of worker {member[0]}"
