"""Keep track of the running turns, so that clients can abort them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from ..driver.driver import now
from ..inference.completion import Completion
from .conversations import Turn
from .dialect import TurnRequest
from .metrics import Metrics
from .registry import OpenSession
from .stateless import StatelessTurn


class _Entry(NamedTuple):
    session: OpenSession | None
    rids: frozenset[str]


class RunningTurns:
    """All running turns of a gateway.

    Args:
        metrics: counts the turns that have ended.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._turns: dict[Turn, _Entry] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn, session: OpenSession | None, requests: Sequence[TurnRequest]) -> None:
        """Add a turn, which is removed when it ends.

        The turn of a repeated request may have been added before.
        """
        began = now()

        def ended(task: asyncio.Task[list[Completion]]) -> None:
            self._turns.pop(turn, None)
            self._metrics.turn_ended(requests, began, task)

        if turn.task.done():
            return
        if turn not in self._turns:
            turn.task.add_done_callback(ended)
        self._turns[turn] = _Entry(session, frozenset(one.rid for one in requests))

    def abort(self, rid: str | None = None, session: OpenSession | None = None) -> int:
        """Abort the running choices of a request, or of all requests.

        A turn of a session is aborted as a whole, and is not in the trajectory.

        Args:
            rid: the id of the request. None: all requests.
            session: abort only turns of this session. None: the turns of all clients.

        Returns:
            The number of turns with choices that were aborted.
        """
        count = 0
        for turn, entry in list(self._turns.items()):
            if (session is not None and entry.session is not session) or (
                rid is not None and rid not in entry.rids
            ):
                continue
            if turn.task.cancelling():
                # The turn was aborted before, and has not ended yet.
                continue
            if isinstance(turn, StatelessTurn):
                count += turn.abort(rid) > 0
            else:
                turn.cancel()
                count += 1
        return count

    def close(self) -> None:
        """End all turns. Their clients receive an error."""
        for turn in self._turns:
            turn.task.cancel()
