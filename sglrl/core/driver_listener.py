"""The interface by which a driver notifies the other parts of a pool of its events."""

from __future__ import annotations

from collections.abc import Sequence

from ..wire.calls import Ready


class DriverListener:
    """Receives the events of a ``Driver`` (see ``Driver.add_listener``).

    A listener overrides the methods that it needs. They run on the event loop and must not block.
    ``worker`` is always an index.
    """

    # --- workers ----------------------------------------------------------------------------------

    def on_starting(self, worker: int, stage: str) -> None:
        """The worker reports the stage of its start."""

    def must_sync(self, worker: int) -> bool:
        """Return True if a ready worker must not get calls before ``Workers.serve``."""
        return False

    def before_serving(self, worker: int) -> None:
        """The worker is about to accept calls. Calls submitted in this method reach it first."""

    def on_ready(self, worker: int, ready: Ready) -> None:
        """The worker is ready."""

    def on_unusable(self, worker: int, reason: str) -> None:
        """The worker cannot be used and must be killed."""

    def on_drained(self, worker: int) -> None:
        """The worker accepts no calls and holds none."""

    def on_lost(self, worker: int) -> None:
        """The worker is lost."""

    def on_away(self, worker: int) -> None:
        """The connection to the worker is broken. If the worker returns, ``on_ready`` follows."""

    def on_loads(self) -> None:
        """An engine has reported its load."""

    # --- peers that are not workers ---------------------------------------------------------------

    def on_peer(self, identity: bytes, frames: Sequence[bytes | bytearray | memoryview]) -> bool:
        """A peer has sent a message. Return False if the peer is unknown."""
        return False

    def on_connection_broken(self) -> None:
        """A connection broke a second ago. Send something to every peer to find the lost one."""
