"""Whose calls a pool serves: its own client, and each client in another process."""

from __future__ import annotations

from typing import Final, Protocol

NO_LIMIT: Final = 1 << 60
"""More bytes than there can be."""


class Queue(Protocol):
    """A queue of calls: a ``FairQueue``."""

    def rejoin(self, client: ClientState) -> None:
        """Find the calls of this client again."""
        ...


class ClientState:
    """One client of a fabric, made by ``Fabric.add_client``.

    Attributes:
        turn: number of the dispatch that last took a waiting call of this client. No two clients of
            a fabric have the same one. Of those with calls of one priority the lowest goes next.
        waiting: calls of this client that wait.
        unread: bytes of answers that were sent to it and that it has not read, and of answers of
            known size that workers compute for it.
        max_unread: with as many unread bytes its calls wait, whoever has room.
        parked: queues in which its calls were passed over because of that.
    """

    __slots__ = ("max_unread", "parked", "turn", "unread", "waiting")

    def __init__(self, turn: int, max_unread: int) -> None:
        self.turn = turn
        self.waiting = 0
        self.unread = 0
        self.max_unread = max_unread
        self.parked: dict[Queue, None] = {}

    @property
    def blocked(self) -> bool:
        """Its calls wait until it has read more."""
        return self.unread >= self.max_unread

    def wake(self) -> bool:
        """It has fewer unread bytes than before. True if calls of it wait that may go now; the
        queues that passed over them find them again."""
        if not self.waiting or self.blocked:
            return False
        if self.parked:
            parked, self.parked = self.parked, {}
            for queue in parked:
                queue.rejoin(self)
        return True

    def __repr__(self) -> str:
        return f"<ClientState turn={self.turn} waiting={self.waiting} unread={self.unread}>"
