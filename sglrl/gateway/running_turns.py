"""The turns that are running, which clients may abort."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from .alone import AloneTurn
from .conversations import Turn
from .dialect import TurnRequest
from .registry import OpenSession


class _Entry(NamedTuple):
    session: OpenSession | None
    rids: frozenset[str]


class RunningTurns:
    """All turns that are running."""

    def __init__(self) -> None:
        self._turns: dict[Turn, _Entry] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn, session: OpenSession | None, requests: Sequence[TurnRequest]) -> None:
        """Add a turn until it ends."""

        def ended(task: asyncio.Task[object]) -> None:
            self._turns.pop(turn, None)

        self._turns[turn] = _Entry(session, frozenset(one.rid for one in requests))
        turn.task.add_done_callback(ended)

    def abort(self, rid: str | None = None, session: OpenSession | None = None) -> int:
        """Abort the choices with an id, or all.

        A turn of a session is aborted as a whole, and is not in the trajectory.

        Args:
            session: only its turns. None: those of all clients.

        Returns:
            The number of turns that had such choices.
        """
        count = 0
        for turn, entry in list(self._turns.items()):
            if (session is not None and entry.session is not session) or (
                rid is not None and rid not in entry.rids
            ):
                continue
            if isinstance(turn, AloneTurn):
                count += turn.abort(rid) > 0
            else:
                turn.task.cancel()
                count += 1
        return count

    def close(self) -> None:
        """End all turns: their clients get an error."""
        for turn in self._turns:
            turn.task.cancel()
