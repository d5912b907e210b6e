"""Deliver every message once and in order, although connections break.

Both sides of a session number their messages, from 1 on, and keep those that the other side has not
acknowledged. After a break, each side tells the other the last number that it received, and sends
the later messages again. TCP does the same for bytes, but only within one connection.
"""

from __future__ import annotations

from collections import deque

from ..errors import ProtocolError


class Redelivery:
    """One side of a session.

    Attributes:
        received: number of the last message that was received, which acknowledges it and all
            earlier messages.
    """

    def __init__(self) -> None:
        self.received = 0
        self._sent = 0
        self._kept: deque[bytes] = deque()
        """The last messages, which the other side has not acknowledged."""

    @property
    def unacknowledged(self) -> int:
        """Number of messages that the other side has not acknowledged."""
        return len(self._kept)

    def send(self, body: bytes) -> int:
        """Keep a message that is about to be sent. Return its number."""
        self._sent += 1
        self._kept.append(body)
        return self._sent

    def receive(self, number: int) -> bool:
        """Record a message. Return whether it is new and must be handled.

        Raises:
            ProtocolError: an earlier message is missing.
        """
        if number > self.received + 1:
            raise ProtocolError(f"message {number} follows message {self.received}")
        if number <= self.received:
            return False
        self.received = number
        return True

    def acknowledge(self, number: int) -> None:
        """Forget all messages up to ``number``, because the other side has received them.

        Raises:
            ProtocolError: a message with this number was never sent.
        """
        if number > self._sent:
            raise ProtocolError(f"message {number} is acknowledged, of {self._sent} sent")
        while self._kept and self._sent - len(self._kept) < number:
            self._kept.popleft()

    def missing(self, received: int) -> list[tuple[int, bytes]]:
        """Return the messages to send again, with their numbers, after a break.

        Args:
            received: the number of the last message that the other side has received.

        Raises:
            ProtocolError: as for ``acknowledge``.
        """
        self.acknowledge(received)
        return list(enumerate(self._kept, self._sent - len(self._kept) + 1))
