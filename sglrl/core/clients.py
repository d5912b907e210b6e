"""The state of each client of a pool: the pool's own client, and clients in other processes."""

from __future__ import annotations

from typing import Final, Protocol

NO_LIMIT: Final = 1 << 60
"""A limit that is larger than any number of bytes."""


class Queue(Protocol):
    """The part of a ``FairQueue`` that a client uses."""

    def rejoin(self, client: ClientState) -> None:
        """Consider the calls of this client again."""
        ...


class ClientState:
    """One client of a fabric, made by ``CallQueue.add_client``.

    Attributes:
        turn: serial number of the last time that a waiting call of this client was sent, or of the
            client's creation. It is unique among the clients of a fabric. Among clients whose calls
            have the same priority, the client with the lowest ``turn`` is served next.
        waiting: number of waiting calls of this client.
        unread: bytes of answers that were sent to the client and that it has not read, plus bytes
            of answers of known size that workers compute for it.
        max_unread: limit of ``unread``. From this limit on, the calls of the client wait even if
            workers have room.
        parked: queues that skipped the calls of the client because it was blocked.
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
        """Whether the calls of the client wait until it has read more of its answers."""
        return self.unread >= self.max_unread

    def wake(self) -> bool:
        """Rejoin the queues that skipped the client, unless it is still blocked.

        Returns:
            True if the client has waiting calls and is not blocked.
        """
        if not self.waiting or self.blocked:
            return False
        if self.parked:
            parked, self.parked = self.parked, {}
            for queue in parked:
                queue.rejoin(self)
        return True

    def __repr__(self) -> str:
        return f"<ClientState turn={self.turn} waiting={self.waiting} unread={self.unread}>"
