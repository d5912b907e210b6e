"""One end of a session between a driver and a node, which survives broken connections.

A node says ``NodeHello`` on every new connection. If the driver knows the session that it names,
the session goes on. Otherwise a new one begins, and the node ends the processes of the old one.

Both ends number their messages, from 1 on, and keep those that the other end has not acknowledged.
After a break, each end tells the other the last number that it received, and sends the later
messages again. Every message arrives once and in order. TCP does the same for bytes, but only
within one connection.
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
"""Seconds between acknowledgements. Both ends send them, which also shows a broken connection."""
MESSAGE_BYTES: Final = 64 << 20
"""Maximum size of a message: a class that travels by value, or the end of a log."""
Send = Callable[[list[bytes]], object]
"""Sends the frames of one message on the current connection, or drops them if it is broken."""


class MessageMissing(ProtocolError):
    """A message was lost: the connection broke, and ZeroMQ has restored it meanwhile.

    A new connection of the session brings the message.
    """


class Session:
    """One end of a session.

    Attributes:
        id: chosen by the driver.
        connected: whether both ends have agreed to go on, on the current connection.
        received: number of the last message that was received.
    """

    def __init__(self, id: str, send: Send) -> None:
        self.id = id
        self.connected = False
        self.received = 0
        self._send = send
        self._sent = 0
        self._kept: deque[bytes] = deque()
        """The last messages, which the other end has not acknowledged."""

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
        """Tell the other end what has arrived, so that it need not keep it. Call this regularly."""
        if self.connected:
            self._send([encode(Acknowledge(self.received))])

    def connect(self, received: int) -> None:
        """Go on, on a new connection, and send what the other end has not received.

        Args:
            received: the number of the last message that the other end has received.

        Raises:
            ProtocolError: it has received more than was sent.
        """
        self._acknowledged(received)
        self.connected = True
        first = self._sent - len(self._kept) + 1
        for number, body in enumerate(self._kept, first):
            self._send([encode(Numbered(number, self.received)), body])

    def disconnect(self) -> None:
        """Keep messages until ``connect``: the connection is broken."""
        self.connected = False

    def receive(self, message: Numbered | Acknowledge) -> bool:
        """Record a message of the other end. Return whether another frame follows.

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
