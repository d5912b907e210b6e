"""One weight update that a test moves forward step by step."""

from __future__ import annotations

from collections.abc import Iterable

from sglrl.core.weight_update import (
    COMMIT,
    DONE,
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
from sglrl.errors import SglrlError, WeightUpdateError

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
