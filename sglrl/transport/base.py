"""What a transport is. Both implementations pass the same tests (``tests/transport``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

MOST_UNREAD: Final = 1 << 16
"""Messages to one peer that it has not taken from the driver's socket. A worker's window is kept so
small that one that reads, however late, cannot come to have so many."""

Frame = bytes | bytearray | memoryview
OnDriverMessage = Callable[[bytes, list[Frame]], None]
OnPause = Callable[[], None]
OnBreak = Callable[[], None]
OnWorkerMessage = Callable[[list[Frame]], None]


class DriverKeys(msgspec.Struct, frozen=True, kw_only=True):
    """CURVE keys of the side that listens, in Z85: its secret key and the clients' public keys."""

    secret: str
    clients: frozenset[str]

    def __repr__(self) -> str:
        return f"DriverKeys(clients={self.clients!r})"

    def __rich_repr__(self) -> list[tuple[str, frozenset[str]]]:
        return [("clients", self.clients)]


class DriverTransport(Protocol):
    """The driver's end: one socket, many workers, each known by its identity.

    Messages from one worker arrive in the order they were sent; nothing is said of the order
    between workers. ``on_message`` runs on the event loop, must not block, and is never called
    after ``close``.
    """

    address: str

    def start(
        self,
        on_message: OnDriverMessage,
        on_pause: OnPause | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        """Deliver messages to ``on_message`` as ``(identity, frames)``. Needs a running loop.

        ``on_pause`` runs after the last of several messages that were delivered in one go: what
        they lead to can be done once. ``on_break`` runs on the loop when a connection was closed or
        broke. The transport does not know whose: from then on, or very soon after, ``send``
        returns False for that peer.
        """
        ...

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        """Hand over one message. False when no such peer is connected, or when ``MOST_UNREAD``
        messages wait for it already: the message is dropped.

        Raises:
            Closed: the transport is closed.
        """
        ...

    def close(self) -> None:
        """Stop at once; may be called again."""
        ...


class WorkerTransport(Protocol):
    """A worker's end, on an event loop."""

    def start(self, on_message: OnWorkerMessage) -> None:
        """Deliver messages to ``on_message``. Needs a running loop."""
        ...

    def send(self, frames: Sequence[Frame]) -> None:
        """Hand over one message.

        Raises:
            Closed: the transport is closed, or the driver refused the connection.
        """
        ...

    def close(self) -> None:
        """Stop at once; may be called again."""
        ...
