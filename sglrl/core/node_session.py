"""One end of a session between a driver and a node. The session survives broken connections.

On every new connection, a node sends ``NodeHello`` with the id of its session. If the driver has
this session, the session continues. Otherwise the driver begins a new session, and the node kills
the processes of the old session.

Both ends number their messages from 1 on, and keep each message until the other end acknowledges
it. After a break, each end reports the serial number of the last message that it received, and the
other end sends the later messages again. Every message arrives once and in order. TCP does the same
for bytes, but only within one connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from ..errors import ProtocolError
from ..wire.codec import encode
from ..wire.nodes import Acknowledge, Numbered

CHECK_SECONDS: Final = 1.0
"""Seconds between two acknowledgements. Their absence also reveals a broken connection."""
MESSAGE_BYTES: Final = 64 << 20
"""Maximum size of a message. Messages may contain the code of a class, or the end of a log."""
Send = Callable[[list[bytes]], object]
"""A function that sends the frames of one message, or drops them if the connection is broken."""


class MessageMissing(ProtocolError):
    """A message is missing, because ZeroMQ lost and restored the connection without a notice.

    When the session connects again, the other end sends the missing message again.
    """


class Session:
    """One end of a session.

    Attributes:
        id: the id of the session, which the driver chooses.
        connected: whether both ends have agreed to continue on the current connection.
        received: serial number of the last received message; 0 before the first message.
    """

    def __init__(self, id: str, send: Send) -> None:
        self.id = id
        self.connected = False
        self.received = 0
        self._send = send
        self._sent = 0
        self._kept: deque[bytes] = deque()
        """The sent messages that the other end has not acknowledged, in order."""

    @property
    def unacknowledged(self) -> int:
        """Number of messages that the other end has not acknowledged."""
        return len(self._kept)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message now, or when the connection is restored."""
        body = encode(message)
        self._sent += 1
        self._kept.append(body)
        if self.connected:
            self._send([encode(Numbered(self._sent, self.received)), body])

    def acknowledge(self) -> None:
        """Acknowledge all received messages, so that the other end drops them. Call regularly."""
        if self.connected:
            self._send([encode(Acknowledge(self.received))])

    def connect(self, received: int) -> None:
        """Continue on a new connection, and send all messages that the other end lacks.

        Args:
            received: the serial number of the last message that the other end has received.

        Raises:
            ProtocolError: the other end reports more messages than were sent.
        """
        self._acknowledged(received)
        self.connected = True
        first = self._sent - len(self._kept) + 1
        for number, body in enumerate(self._kept, first):
            self._send([encode(Numbered(number, self.received)), body])

    def disconnect(self) -> None:
        """Record that the connection is broken. Messages are kept until ``connect``."""
        self.connected = False

    def receive(self, message: Numbered | Acknowledge) -> bool:
        """Record the first frame of a message. Return True if a frame with the content follows.

        Raises:
            MessageMissing: this is not the next message.
            ProtocolError: the message does not fit the session.
        """
        if not self.connected:
            raise ProtocolError("a message of a session on a connection that did not begin it")
        self._acknowledged(message.received)
        if isinstance(message, Acknowledge):
            return False
        if message.number != self.received + 1:
            raise MessageMissing(f"message {message.number} follows message {self.received}")
        self.received = message.number
        return True

    def _acknowledged(self, number: int) -> None:
        """Forget all messages up to ``number``, which the other end has received."""
        if number > self._sent:
            raise ProtocolError(f"message {number} is acknowledged, of {self._sent} sent")
        while self._kept and self._sent - len(self._kept) < number:
            self._kept.popleft()
