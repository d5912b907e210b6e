"""The asyncio shell around ``core.fabric``: one receiver, one timer, and the fabric's effects.

A call enters the fabric at once. The driver sends messages at the end of the loop tick: one to each
worker, or several if there are many calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

from ..config import FabricConfig
from ..core.calls import Call
from ..core.clients import ClientState
from ..core.driver_listener import DriverListener
from ..core.effects import Chunk, Drained, End, Restart, Send, SendCancel, Waiting
from ..core.fabric import Fabric
from ..core.members import AWAY, GONE, READY, RETIRED, STALE, STARTING, SYNCING, Member
from ..errors import Closed, ProtocolError, UsageError
from ..transport.base import MAX_UNREAD, DriverTransport
from ..transport.dropped import Dropped
from ..wire.calls import (
    PROTOCOL_VERSION,
    Cancel,
    ErrorBody,
    Item,
    ItemKind,
    Ready,
    Results,
    ShareRows,
    Shutdown,
    Starting,
    ToDriver,
)
from ..wire.codec import Buffer, decode_to_driver, encode, encode_submit, readable
from .links import Links
from .raw_frames import RawFrames
from .reply import fail

logger = logging.getLogger("sglrl.driver")
now = time.monotonic

ENVELOPE_BYTES: Final = 4096
"""Upper bound of the size of a message without its bodies."""
_AT_ONCE: Final = 256
"""With more effects than this, execute them before reading the next message."""

_FIND_LOST_SECONDS: Final = 1.0
"""Seconds from a broken connection to the search for the lost peer. If a worker has exited, the
fork server reports the exit and its reason within this time."""

_PIECE: Final = 64
"""With this many new calls per worker, send before the tick ends. Otherwise the driver and a fast
worker would alternate: each would be idle while the other works."""


_RETURN_FROM: Final = (READY, SYNCING, STALE)
"""The states from which a worker may go away and return."""


class Driver:
    """Joins a ``Fabric`` to a transport on the running event loop, and notifies listeners.

    Args:
        workers_return: a worker whose connection breaks connects again, ends all its calls and
            sends ``Ready``. False: such a worker exits.
    """

    def __init__(
        self,
        transport: DriverTransport,
        config: FabricConfig | None = None,
        max_message_bytes: int = 256 << 20,
        encode_calls: Callable[[list[Call]], list[Any]] = encode_submit,
        *,
        workers_return: bool = False,
    ) -> None:
        self.transport = transport
        self._workers_return = workers_return
        self.max_message_bytes = max_message_bytes
        self.fabric = Fabric(config)
        self._drop = Dropped(logger)
        self._listeners: list[DriverListener] = []
        self._raw: dict[int, list[Buffer]] = {}
        """The raw frames of the items in the outbox, by the ``id`` of the item."""
        self._links = Links(transport, encode_calls, max_message_bytes, self)
        self._frames = RawFrames()
        self.loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._flush_scheduled = False
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._search: asyncio.TimerHandle | None = None
        self._piece = _PIECE
        self._idle: asyncio.Future[None] | None = None
        self._change: asyncio.Future[None] | None = None

    def add_listener(self, listener: DriverListener) -> None:
        """Notify a listener of events, after the listeners that were added before."""
        self._listeners.append(listener)

    def remove_listener(self, listener: DriverListener) -> None:
        """Stop notifying a listener. Do nothing if the listener was never added."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def start(self) -> None:
        self.transport.start(self._on_message, self._on_pause, self._on_break)

    @property
    def dropped(self) -> int:
        """Number of dropped messages: from unknown peers, malformed, or in the wrong state.

        ``fabric.stray_items`` counts items of other messages that belong to no call.
        """
        return self._drop.count

    @property
    def max_queue(self) -> int:
        """Maximum number of calls that wait in the driver for a worker."""
        return self.fabric.config.max_queue

    def windows(self, worker: int | None) -> int:
        """Return the number of calls that all workers, or the worker of this index, may hold."""
        return sum(
            [
                member.window
                for member in self.fabric.members.values()
                if member.state is not RETIRED and worker in (None, member.index)
            ]
        )

    @property
    def ready(self) -> list[int]:
        """Indices of the workers that accept calls."""
        return [index for index, m in self.fabric.members.items() if m.state is READY]

    # --- workers ----------------------------------------------------------------------------------

    def add_worker(self, index: int, identity: bytes) -> None:
        """Add a new worker, or the replacement of a lost worker."""
        member = self.fabric.add_member(index)
        self._links.add(member, identity)
        self._piece = _PIECE * len(self._links)

    def worker_lost(self, index: int, reason: str, *, returns: bool = False) -> None:
        """Record that a worker is lost.

        Args:
            returns: the caller starts a replacement later, or calls ``worker_retired``.
        """
        member = self.fabric.members[index]
        if member.state in GONE:
            return
        self.fabric.member_lost(index, reason, now(), returns=returns)
        self._links.remove(member)
        self._piece = _PIECE * (len(self._links) or 1)
        self._frames.close(member)
        self._flush()
        self._changed()
        for listener in self._listeners:
            listener.on_lost(index)

    def worker_away(self, index: int, reason: str) -> None:
        """Record that the connection to a worker is broken. Its calls continue on other workers."""
        self.fabric.member_away(index, reason, now())
        self._frames.close(self.fabric.members[index])
        self._flush()
        self._changed()
        for listener in self._listeners:
            listener.on_away(index)

    def worker_retired(self, index: int, reason: str) -> None:
        self.fabric.member_retired(index, reason)
        self._flush()
        self._changed()

    def serve(self, index: int) -> None:
        """Let a worker accept calls: it now has the current weights."""
        member = self.fabric.members[index]
        self._before_serving(index)
        self.fabric.member_ready(index, member.window, now())
        self._flush()
        self._changed()

    def set_syncing(self, index: int, *, stale: bool) -> None:
        """Record that a running worker receives the current weights.

        Args:
            stale: the worker could not receive the current weights.
        """
        self.fabric.members[index].move(STALE if stale else SYNCING)
        self._changed()

    def drain(self, index: int) -> None:
        """Send a worker no more calls. ``on_drained`` is called when the worker holds no call."""
        self.fabric.drain_member(index, now())
        self._flush()
        self._changed()

    def _changed(self) -> None:
        """Wake the tasks that wait for a worker to change its state."""
        if self._change is not None:
            change, self._change = self._change, None
            change.set_result(None)

    def change(self) -> asyncio.Future[None]:
        """Return a future that completes when a worker changes its state."""
        if self._change is None:
            self._change = self.loop.create_future()
        return asyncio.shield(self._change)

    def idle(self) -> asyncio.Future[None]:
        """Return a future that completes when no call is left. Use it while there are calls.

        New calls may exist when the waiting task continues.
        """
        if self._idle is None:
            self._idle = self.loop.create_future()
        return asyncio.shield(self._idle)

    def send_to_peer(self, identity: bytes, *frames: Buffer) -> bool:
        """Send to a peer that is not a worker. Return False if the peer is not connected."""
        try:
            return self.transport.send(identity, frames)
        except Closed:
            return False

    def shut_down_worker(self, index: int) -> None:
        self._links.send(self.fabric.members[index], [encode(Shutdown())])

    @property
    def is_copied(self) -> bool:
        """Whether this process was forked from the owner: it must not touch sockets and locks."""
        return os.getpid() != self._pid

    def check_loop(self) -> None:
        """Raise ``UsageError`` if the running event loop is not the loop of this driver."""
        if asyncio.get_running_loop() is not self.loop:
            raise UsageError(
                "this was started on another event loop than the one that it is used on, where its "
                "answers would never arrive; use it on the loop that started it (pytest-asyncio: "
                "the same loop_scope), or sglrl.blocking"
            )

    # --- calls ------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Submit a call.

        Raises:
            UsageError: the running event loop is not the loop of this driver.

        See ``Fabric.submit`` for further errors.
        """
        fabric = self.fabric
        if self._flush_scheduled:
            fabric.submit(call, now())
            if len(fabric.outbox) >= self._piece and not self._flushing:
                # Workers start on these calls while the tasks of this tick make more.
                self._flush()
            return
        self.check_loop()
        fabric.submit(call, now())
        self._flush_soon()

    def cancel(self, call: Call) -> None:
        """Cancel a call whose caller no longer waits, and ask its worker to stop."""
        self.fabric.cancel(call, now())
        self._flush_soon()

    def hold(self, part: str, reason: str | None) -> None:
        """See ``Holds.set``."""
        self.fabric.holds.set(part, reason, now())
        self._set_timer()

    def read_by_client(self, client: ClientState, size: int) -> None:
        """See ``Fabric.read_by_client``."""
        self.fabric.read_by_client(client, size, now())
        if self.fabric.outbox:
            self._flush_soon()

    def answer_waiting(self, endpoint: str, body: bytes, worker: int | None) -> int:
        """See ``Fabric.answer_waiting``."""
        count = self.fabric.answer_waiting(endpoint, body, worker)
        self._flush()
        return count

    def close(self, reason: str = "the pool was closed") -> None:
        """End every call with ``Closed``. The transport stays open for ``shut_down_worker``."""
        if not self.fabric.closed:
            self.fabric.close(reason)
            self._flush()
            self._changed()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._search is not None:
            self._search.cancel()
            self._search = None

    # --- inside -----------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, frames: list[Buffer]) -> None:
        member = self._links.find(identity)
        if member is None:
            listeners = self._listeners if frames else ()
            known = any(listener.on_peer(identity, frames) for listener in listeners)
            # A worker that was still starting when the pool was closed is expected here.
            if not known and not self.fabric.closed:
                # Do not log the identity: it is a secret.
                self._drop("a message of a stranger, or of a peer that was not asked for it")
            return
        try:
            message = decode_to_driver(frames[0])
            if type(message) is Results and (message.slots or len(frames) > 1):
                owned = self._frames.split(member, message, frames)
                self._raw |= zip(map(id, message.items), owned, strict=True)
        except (ProtocolError, IndexError) as error:
            self._drop("a message of worker %d: %s", member.index, error)
            return
        if type(message) is not Results:
            self._on_control(member, message)
            return
        if message.load is not None:
            member.reported = message.load
            for listener in self._listeners:
                listener.on_loads()
        fabric = self.fabric
        fabric.results(member, message.items, now())
        if len(fabric.outbox) > _AT_ONCE:
            # Execute the effects within the time of this message: the transport limits the time of
            # a batch, and then lets the event loop run other tasks.
            self._flush()

    def _on_control(self, member: Member, message: ToDriver) -> None:
        expected: tuple[str, ...] = (STARTING,)
        if self._workers_return and type(message) is Ready:
            expected = (STARTING, AWAY)
            if member.state not in expected:
                # The worker has noticed first that its connection was broken.
                self.on_unreachable(member)
        if member.state not in expected:
            self._drop("worker %d is %s, and says %r", member.index, member.state, message)
            return
        match message:
            case Starting(stage=stage):
                for listener in self._listeners:
                    listener.on_starting(member.index, stage)
            case Ready(protocol=protocol) if protocol != PROTOCOL_VERSION:
                self._unusable(
                    member.index,
                    f"it speaks version {protocol} of the protocol and the driver version "
                    f"{PROTOCOL_VERSION}; install the same sglrl on both sides",
                )
            case Ready(window=window) if window < 1:
                self._drop("worker %d offers a window of %d", member.index, window)
            case Ready():
                if self._frames.open(member, message):
                    # From now on, the worker writes rows to this memory instead of a message.
                    self._links.send(member, [encode(ShareRows())])
                # A call takes at most two messages: one to submit it and one to cancel it.
                window = min(message.window, MAX_UNREAD // 2)
                if any(listener.must_sync(member.index) for listener in self._listeners):
                    self.fabric.member_arrived(member.index, window)
                else:
                    self._before_serving(member.index)
                    self.fabric.member_ready(member.index, window, now())
                for listener in self._listeners:
                    listener.on_ready(member.index, message)
                self._changed()

    def _before_serving(self, index: int) -> None:
        for listener in self._listeners:
            listener.before_serving(index)

    def _unusable(self, index: int, reason: str) -> None:
        for listener in self._listeners:
            listener.on_unusable(index, reason)

    def _drained(self, index: int) -> None:
        for listener in self._listeners:
            listener.on_drained(index)

    def _on_pause(self) -> None:
        """Flush once: every message that had arrived has been processed."""
        if self.fabric.outbox:
            self._flush()
        else:
            self._raw.clear()

    def _flush_soon(self) -> None:
        """Flush at the end of this loop tick."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        """Execute the outbox, then set the timer to the next deadline."""
        fabric = self.fabric
        effects, fabric.outbox = fabric.outbox, []
        raw, self._raw = self._raw, {}
        submits: dict[Member, list[Call]] = {}
        cancels: dict[Member, list[int]] = {}
        self._flushing = True
        for effect in effects:
            try:
                # Patterns with fields, such as ``End(call, outcome)``, take twice as long.
                match effect:
                    case Send():
                        submits.setdefault(effect.member, []).append(effect.call)
                    case End():
                        frames = raw.get(id(effect.outcome), ())
                        effect.call.reply.end(effect.call, effect.outcome, frames)
                    case Chunk():
                        effect.call.reply.chunk(effect.item, raw.get(id(effect.item), ()))
                    case SendCancel():
                        cancels.setdefault(effect.member, []).append(effect.id)
                    case Restart():
                        effect.call.reply.restart(effect.call)
                    case Drained():
                        self.loop.call_soon(self._drained, effect.member.index)
                    case Waiting():
                        logger.warning("calls wait: %s", effect.reason)
            except Exception as error:
                assert isinstance(effect, End | Chunk | Restart)
                if not isinstance(effect, End):
                    self.cancel(effect.call)
                fail(effect.call, error)
        self._flushing = False
        for member, calls in submits.items():
            self._links.send_calls(member, calls)
        for member, ids in cancels.items():
            self._links.send(member, [encode(Cancel(ids))])
        self._set_timer()
        if self._idle is not None and not fabric.calls:
            idle, self._idle = self._idle, None
            idle.set_result(None)

    def on_refused(self, member: Member, call: Call, error: Exception) -> None:
        """End a call that cannot be sent, as if the worker had answered with an error.

        Other calls are not affected.
        """
        what = f"{call.endpoint}: the call cannot be sent: {readable(error)}"
        body = encode(ErrorBody(UsageError.__name__, what, ""))
        self.fabric.results(member, [Item(call.id, ItemKind.ERROR, body)], now())
        self._flush_soon()

    def _on_break(self) -> None:
        if self._search is None and not self.fabric.closed:
            self._search = self.loop.call_later(_FIND_LOST_SECONDS, self._find_lost)

    def _find_lost(self) -> None:
        """Send every peer a message, which fails if the peer is unreachable."""
        self._search = None
        self._links.probe()
        for listener in self._listeners:
            listener.on_connection_broken()

    def on_unreachable(self, member: Member) -> None:
        """Treat a worker as lost, or as away if it may return."""
        reason = "its connection is gone, or it does not read"
        if member.state is AWAY:
            return
        if self._workers_return and member.state in _RETURN_FROM:
            self.worker_away(member.index, reason)
            return
        self._unusable(member.index, reason)
        self.worker_lost(member.index, reason)

    def _set_timer(self) -> None:
        at = self.fabric.next_deadline()
        if at is None:
            return
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self.loop.call_later(max(0.0, at - now()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.fabric.tick(now())
        self._flush()
