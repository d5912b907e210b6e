"""The state that a session shares with its forks: history, metadata, and running turns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

from ..control.latest import Watch
from ..core.policy_versions import Versions, oldest_of
from ..driver.driver import now
from ..inference.replies import OnChunk
from ..wire.engine import TokenChunk
from .history import History
from .options import SessionOptions

_numbers: Final = itertools.count()
NameSession = Callable[[Any, str], None]
"""A function that lets HTTP requests with a value of ``X-Session-ID`` select a session."""


class Turn(Protocol):
    """The turn that a session is sampling."""

    def end_turn(self) -> None:
        """End the turn: it raises ``Closed``."""


class Shared:
    """The state that a session and its forks have in common.

    Attributes:
        closed: whether the session is closed. No turn begins afterwards.
        refused: whether a turn failed because the client no longer accepts calls.
        running: for each turn that is being sampled, a lower bound of the policy versions of its
            first token. None: no bound is known yet.
        name_session: lets HTTP requests with the header ``X-Session-ID`` select a session. None:
            these sessions have no gateway.
        generating: the seconds during which at least one turn was being sampled.
        live_id: identifies the session among all processes of this machine.
        watch: wakes programs that watch the session.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.history = History(options.reward_weights)
        self.metadata = dict(options.metadata)
        self.closed = self.refused = False
        self.running: dict[Turn, Versions | None] = {}
        self.name_session: NameSession | None = None
        self.generating = 0.0
        self.began = now()
        self.live_id = f"{os.getpid()}-{next(_numbers)}"
        self.watch = Watch()
        self._oldest: Versions = {}
        self._sampling = self._numbered = 0
        self._since = 0.0

    @property
    def oldest(self) -> dict[str, int]:
        """For each policy, a lower bound of its versions in the ended and the running turns."""
        bounds = [versions for versions in self.running.values() if versions is not None]
        return oldest_of([self._oldest, *bounds])

    def close(self) -> None:
        self.closed = True
        for turn in list(self.running):
            turn.end_turn()
        self.watch.tell()

    def enter(self) -> None:
        """Count a running turn."""
        if not self._sampling:
            self._since = now()
        self._sampling += 1
        self.watch.tell()

    def leave(self) -> None:
        self._sampling -= 1
        if not self._sampling:
            self.generating += now() - self._since
        self.watch.tell()

    def telling(self, on_chunk: OnChunk | None) -> OnChunk | None:
        """Return the callback for the chunks of a turn, which also wakes those who watch."""
        if not self.watch.active:
            return on_chunk

        def tell(chunk: TokenChunk) -> None:
            if on_chunk is not None:
                on_chunk(chunk)
            self.watch.tell()

        return tell

    def number_turn(self) -> int:
        """Return a number that is unique among the turns of the session and its forks."""
        self._numbered += 1
        return self._numbered - 1

    def sampled(self, versions: Versions) -> None:
        """Record the policy versions of the first token of a turn."""
        self._oldest = oldest_of([self._oldest, versions])
