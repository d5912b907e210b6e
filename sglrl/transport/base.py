"""The interface of transports. Both implementations pass the same tests (``tests/transport``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

MAX_UNREAD: Final = 1 << 16
"""Maximum number of messages to one peer that wait in the driver's socket.

The driver limits the number of unfinished calls of each worker. Only for a worker that no longer
reads can so many messages wait.
"""

Frame = bytes | bytearray | memoryview
OnDriverMessage = Callable[[bytes, list[Frame]], None]
OnPause = Callable[[], None]
OnBreak = Callable[[], None]
OnWorkerMessage = Callable[[list[Frame]], None]


class DriverKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The CURVE keys of the listening side in Z85: its secret key and the clients' public keys."""

    secret: str
    clients: frozenset[str]

    def __repr__(self) -> str:
        return f"DriverKeys(clients={self.clients!r})"

    def __rich_repr__(self) -> list[tuple[str, frozenset[str]]]:
        return [("clients", self.clients)]


class DriverTransport(Protocol):
    """The driver's end of a transport: one socket for many workers, which have identities.

    Messages from one worker arrive in the order in which they were sent. The order of messages from
    different workers is undefined. ``on_message`` runs on the event loop, must not block, and is
    never called after ``close``.
    """

    address: str

    def start(
        self,
        on_message: OnDriverMessage,
        on_pause: OnPause | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        """Start to deliver messages, on the running event loop.

        Args:
            on_message: ``on_message(identity, frames)`` is called for each message.
            on_pause: is called after the last message of a batch, so that the receiver can act once
                for the whole batch.
            on_break: is called on the event loop when a connection was closed or broke. The
                transport cannot tell which connection. From now on, or from very soon after,
                ``send`` returns False for the peer of this connection.
        """
        ...

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """Send one message.

        Returns:
            False if the message was dropped, because the peer is not connected or has
            ``MAX_UNREAD`` unread messages.

        Raises:
            Closed: the transport is closed.
        """
        ...

    def close(self) -> None:
        """Stop at once. Closing again has no effect."""
        ...


class WorkerTransport(Protocol):
    """A worker's end of a transport, on an event loop."""

    def start(self, on_message: OnWorkerMessage) -> None:
        """Start to deliver messages to ``on_message(frames)``, on the running event loop."""
        ...

    def send(self, frames: Sequence[Frame]) -> None:
        """Send one message.

        Raises:
            Closed: the transport is closed, or the driver refused the connection.
        """
        ...

    def close(self) -> None:
        """Stop at once. Closing again has no effect."""
        ...
