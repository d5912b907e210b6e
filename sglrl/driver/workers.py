"""Change the states of a driver's workers when the pool, a worker or a connection causes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..core.fabric import Fabric
from ..core.members import AWAY, GONE, READY, STALE, STARTING, SYNCING, Member
from ..errors import UsageError
from ..transport.base import MAX_UNREAD
from ..transport.dropped import Dropped
from ..wire.calls import (
    PROTOCOL_VERSION,
    ErrorBody,
    Item,
    ItemKind,
    Ready,
    ShareRows,
    Shutdown,
    Starting,
    ToDriver,
)
from ..wire.codec import encode, readable
from .links import Links, RawFrames

now = time.monotonic

_FIND_LOST_SECONDS: Final = 1.0
"""Seconds between a broken connection and the search for the lost peer. If a worker has exited, the
fork server reports the exit with its reason before the search."""

_PIECE: Final = 64
"""With this many new calls per worker, the driver sends before the tick ends. If it sent only at
the end, the driver and a fast worker would alternate: each would be idle while the other works."""

_RETURN_FROM: Final = (READY, SYNCING, STALE)
"""The states from which a worker may go away and return."""


class Workers:
    """Moves the workers of one driver between their states, and notifies the driver's listeners.

    Args:
        fabric: holds the states.
        links: the connections to the workers.
        listeners: the driver's list of listeners, which changes.
        changed: executes the effects of a state change, and wakes the tasks that wait for a change.
        dropped: counts the messages that are dropped.
        may_return: whether a worker whose connection breaks ends all its calls, connects again and
            sends ``Ready``. If not, such a worker exits.

    Attributes:
        frames: finds the raw frames of the workers' results.
        piece: with this many effects in the outbox, the driver sends before the tick ends.
    """

    def __init__(
        self,
        fabric: Fabric,
        links: Links,
        listeners: list[DriverListener],
        changed: Callable[[], None],
        dropped: Dropped,
        *,
        may_return: bool,
    ) -> None:
        self._fabric = fabric
        self._links = links
        links.listener = self
        self._listeners = listeners
        self._changed = changed
        self._dropped = dropped
        self._may_return = may_return
        self.frames = RawFrames()
        self.piece = _PIECE
        self._loop = asyncio.get_running_loop()
        self._search: asyncio.TimerHandle | None = None

    # --- the pool changes a worker ----------------------------------------------------------------

    def add(self, index: int, identity: bytes) -> None:
        """Add a new worker, or the replacement of a lost worker."""
        self._links.add(self._fabric.add_member(index), identity)
        self.piece = _PIECE * len(self._links.members)

    def lost(self, index: int, reason: str, *, returns: bool = False) -> None:
        """Record that a worker is lost.

        Args:
            returns: whether a replacement is expected. The caller later starts it or calls
                ``retired``.
        """
        member = self._fabric.members[index]
        if member.state in GONE:
            return
        self._fabric.member_lost(index, reason, now(), returns=returns)
        self._links.remove(member)
        self.piece = _PIECE * (len(self._links.members) or 1)
        self.frames.close(member)
        self._changed()
        for listener in self._listeners:
            listener.on_lost(index)

    def retired(self, index: int, reason: str) -> None:
        """Record that a lost worker gets no replacement."""
        self._fabric.member_retired(index, reason)
        self._changed()

    def serve(self, index: int) -> None:
        """Let a worker accept calls, because it now has the current weights."""
        self._serve(index, self._fabric.members[index].window)
        self._changed()

    def set_syncing(self, index: int, *, stale: bool) -> None:
        """Record that a running worker receives the current weights, or could not receive them.

        Args:
            stale: whether the worker could not receive the current weights.
        """
        self._fabric.members[index].move(STALE if stale else SYNCING)
        self._changed()

    def drain(self, index: int) -> None:
        """Send a worker no more calls. ``on_drained`` is called when the worker holds no call."""
        self._fabric.drain_member(index, now())
        self._changed()

    def shut_down(self, index: int) -> None:
        """Ask a worker to exit."""
        self._links.send(self._fabric.members[index], [encode(Shutdown())])

    # --- a worker reports -------------------------------------------------------------------------

    def on_message(self, member: Member, message: ToDriver) -> None:
        """Handle a message other than ``Results``."""
        expected: tuple[str, ...] = (STARTING,)
        if self._may_return and type(message) is Ready:
            expected = (STARTING, AWAY)
            if member.state not in expected:
                # The worker noticed the broken connection before the driver did.
                self.on_unreachable(member)
        index, drop = member.index, self._dropped
        if member.state not in expected:
            drop("worker %d is %s, and says %r", index, member.state, message)
            return
        match message:
            case Starting(stage=stage):
                for listener in self._listeners:
                    listener.on_starting(index, stage)
            case Ready(protocol=protocol) if protocol != PROTOCOL_VERSION:
                self._unusable(
                    index,
                    f"it speaks version {protocol} of the protocol and the driver version "
                    f"{PROTOCOL_VERSION}; install the same sglrl on both sides",
                )
            case Ready(window=window) if window < 1:
                drop("worker %d offers a window of %d", index, window)
            case Ready():
                self._on_ready(member, message)

    def _on_ready(self, member: Member, ready: Ready) -> None:
        index = member.index
        if self.frames.open(member, ready):
            # After this message, the worker writes rows to this memory instead of its messages.
            self._links.send(member, [encode(ShareRows())])
        # A call takes at most two messages: one to submit it and one to cancel it.
        window = min(ready.window, MAX_UNREAD // 2)
        if any(listener.must_sync(index) for listener in self._listeners):
            self._fabric.member_arrived(index, window)
        else:
            self._serve(index, window)
        for listener in self._listeners:
            listener.on_ready(index, ready)
        self._changed()

    def _serve(self, index: int, window: int) -> None:
        for listener in self._listeners:
            listener.before_serving(index)
        self._fabric.member_ready(index, window, now())

    def drained(self, index: int) -> None:
        """Notify the listeners that a worker accepts no calls and holds none."""
        for listener in self._listeners:
            listener.on_drained(index)

    # --- connections ------------------------------------------------------------------------------

    def on_refused(self, member: Member, call: Call, error: Exception) -> None:
        """End a call that cannot be sent, as if the worker had answered with an error.

        Other calls are not affected.
        """
        what = f"{call.endpoint}: the call cannot be sent: {readable(error)}"
        body = encode(ErrorBody(UsageError.__name__, what, ""))
        self._fabric.results(member, [Item(call.id, ItemKind.ERROR, body)], now())
        self._changed()

    def on_unreachable(self, member: Member) -> None:
        """Treat a worker as lost, or as away if it may return."""
        index, reason = member.index, "its connection is gone, or it does not read"
        if member.state is AWAY:
            return
        if not (self._may_return and member.state in _RETURN_FROM):
            self._unusable(index, reason)
            self.lost(index, reason)
            return
        self._fabric.member_away(index, reason, now())
        self.frames.close(member)
        self._changed()
        for listener in self._listeners:
            listener.on_away(index)

    def _unusable(self, index: int, reason: str) -> None:
        for listener in self._listeners:
            listener.on_unusable(index, reason)

    def on_break(self) -> None:
        """Search for the lost peer soon, because a connection broke."""
        if self._search is None and not self._fabric.closed:
            self._search = self._loop.call_later(_FIND_LOST_SECONDS, self._find_lost)

    def _find_lost(self) -> None:
        """Send a message to every peer, to find peers that are unreachable."""
        self._search = None
        self._links.probe()
        for listener in self._listeners:
            listener.on_connection_broken()

    def close(self) -> None:
        """Stop searching for lost peers."""
        if self._search is not None:
            self._search.cancel()
            self._search = None
