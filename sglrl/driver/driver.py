"""The asyncio shell around ``core.fabric``: one receiver, one timer, and the fabric's effects.

A call enters the fabric at once. The driver sends messages at the end of the event loop's tick: one
to each worker, or several if there are many calls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from ..config import FabricConfig
from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..core.effects import Chunk, Drained, End, Restart, Send, SendCancel, Waiting
from ..core.fabric import Fabric
from ..core.members import READY, RETIRED, Member
from ..errors import Closed, ProtocolError, SglrlError, UsageError
from ..transport.base import DriverTransport
from ..transport.dropped import Dropped
from ..wire.calls import Cancel, Item, Results
from ..wire.codec import Buffer, decode_to_driver, encode, encode_submit
from .links import Links
from .workers import Workers

logger = logging.getLogger("sglrl.driver")
now = time.monotonic

ENVELOPE_BYTES: Final = 4096
"""Upper bound of the size of a message without its bodies."""
_AT_ONCE: Final = 256
"""If the outbox has more effects than this, execute them before reading the next message."""


class Reply(Protocol):
    """Receives the events of one call, on the event loop.

    A method must not block. If it raises an exception, the call fails.
    """

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """A part of the answer has arrived."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        """The call has ended with this answer or error. This event comes exactly once, last."""

    def restart(self, call: Call) -> None:
        """The call lost its worker and runs again.

        If the call is resumable, put the tokens of its chunks into ``call.args``. Otherwise discard
        the chunks.
        """


class Driver:
    """Joins a ``Fabric`` to a transport on the running event loop, and notifies listeners.

    Args:
        encode_calls: returns the frames of one message with the given calls.
        workers_return: see ``may_return`` of ``Workers``.

    Attributes:
        workers: changes the states of the workers.
        dropped: counts dropped messages, which are from unknown peers, malformed, or not allowed in
            the worker's state. ``fabric.stray_items`` counts items that belong to no call.
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
        self.max_message_bytes = max_message_bytes
        self.fabric = Fabric(config)
        self.dropped = Dropped(logger)
        self._listeners: list[DriverListener] = []
        self._raw: dict[int, list[Buffer]] = {}
        """The raw frames of the items in the outbox, by the ``id`` of the item."""
        self._links = Links(transport, encode_calls, max_message_bytes)
        self.workers = Workers(
            self.fabric,
            self._links,
            self._listeners,
            self._changed,
            self.dropped,
            may_return=workers_return,
        )
        self.loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._flush_scheduled = False
        self._flushing = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._idle: asyncio.Future[None] | None = None
        self._change: asyncio.Future[None] | None = None

    def add_listener(self, listener: DriverListener) -> None:
        """Notify a listener of events, after the listeners that were added before."""
        self._listeners.append(listener)

    def remove_listener(self, listener: DriverListener) -> None:
        """Stop notifying a listener. Do nothing if the listener was never added."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def start(self) -> None:
        self.transport.start(self._on_message, self._on_pause, self.workers.on_break)

    def capacity(self, worker: int | None) -> tuple[int, int]:
        """Return how many calls the workers may hold, and how many may wait for a worker.

        Args:
            worker: the index of the worker to consider. None: all workers.
        """
        windows = [
            member.window
            for member in self.fabric.members.values()
            if member.state is not RETIRED and worker in (None, member.index)
        ]
        return sum(windows), self.fabric.config.max_queue

    @property
    def ready(self) -> list[int]:
        """Indices of the workers that accept calls."""
        return [index for index, m in self.fabric.members.items() if m.state is READY]

    def change(self) -> asyncio.Future[None]:
        """Return a future that completes when a worker changes its state."""
        if self._change is None:
            self._change = self.loop.create_future()
        return asyncio.shield(self._change)

    def _changed(self) -> None:
        """Execute the effects of a state change, and wake the tasks that wait for a change."""
        self._flush()
        if self._change is not None:
            change, self._change = self._change, None
            change.set_result(None)

    def idle(self) -> asyncio.Future[None]:
        """Return a future that completes when no call is left. There must be a call now.

        New calls may exist again when the waiting task continues.
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

    @property
    def is_copied(self) -> bool:
        """Whether this process is a fork and must not use the sockets and locks of its parent."""
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

        ``Fabric.submit`` lists further errors.
        """
        fabric = self.fabric
        if self._flush_scheduled:
            fabric.submit(call, now())
            if len(fabric.outbox) >= self.workers.piece and not self._flushing:
                # Workers start these calls while the tasks of this tick submit more calls.
                self._flush()
            return
        self.check_loop()
        fabric.submit(call, now())
        self.flush_soon()

    async def submit_all(
        self,
        calls: list[Call],
        futures: Sequence[asyncio.Future[Any]],
        *,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Submit calls, and return their results in order.

        Args:
            futures: the futures of the results.
            return_exceptions: whether to return failures in place of results.

        Raises:
            Exception: the first failure, which cancels the other calls.
        """
        submitted = 0
        try:
            for call in calls:
                self.submit(call)
                submitted += 1
            return await asyncio.gather(*futures, return_exceptions=return_exceptions)
        finally:
            for call, future in zip(calls[:submitted], futures, strict=False):
                # A worker may still compute a call whose answer was malformed.
                if not future.done() or future.cancelled() or future.exception() is not None:
                    self.cancel(call)
            for future in futures:
                # A trace's span of a call ends with its future.
                future.cancel()

    def cancel(self, call: Call) -> None:
        """Cancel a call whose caller no longer waits, and ask its worker to stop."""
        self.fabric.cancel(call, now())
        self.flush_soon()

    def hold(self, part: str, reason: str | None) -> None:
        """Set the reason why a part of the pool holds back calls, as ``Holds.set`` does."""
        self.fabric.holds.set(part, reason, now())
        self._set_timer()

    def close(self, reason: str = "the pool was closed") -> None:
        """End every call with ``Closed``. The transport stays open for ``Workers.shut_down``."""
        if not self.fabric.closed:
            self.fabric.close(reason)
            self._changed()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.workers.close()

    # --- inside -----------------------------------------------------------------------------------

    def _on_message(self, identity: bytes, frames: list[Buffer]) -> None:
        member = self._links.members.get(identity)
        if member is None:
            listeners = self._listeners if frames else ()
            known = any(listener.on_peer(identity, frames) for listener in listeners)
            # A worker that was still starting when the pool was closed is expected here.
            if not known and not self.fabric.closed:
                # Do not log the identity: it is a secret.
                self.dropped("a message of a stranger, or of a peer that was not asked for it")
            return
        try:
            message = decode_to_driver(frames[0])
            if type(message) is Results and (message.slots or len(frames) > 1):
                owned = self.workers.frames.split(member, message, frames)
                self._raw |= zip(map(id, message.items), owned, strict=True)
        except (ProtocolError, IndexError) as error:
            self.dropped("a message of worker %d: %s", member.index, error)
            return
        if type(message) is not Results:
            self.workers.on_message(member, message)
            return
        if message.load is not None:
            member.reported = message.load
            for listener in self._listeners:
                listener.on_loads()
        fabric = self.fabric
        fabric.results(member, message.items, now())
        if len(fabric.outbox) > _AT_ONCE:
            # Execute the effects as part of this message. The transport limits the time of a batch
            # of messages, so that the event loop can run other tasks.
            self._flush()

    def _on_pause(self) -> None:
        """Flush once, after every message that had arrived has been processed."""
        if self.fabric.outbox:
            self._flush()
        else:
            self._raw.clear()

    def flush_soon(self) -> None:
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
                        self.loop.call_soon(self.workers.drained, effect.member.index)
                    case Waiting():
                        logger.warning("calls wait: %s", effect.reason)
            except Exception as error:
                assert isinstance(effect, End | Chunk | Restart)
                if not isinstance(effect, End):
                    self.cancel(effect.call)
                _fail(effect.call, error)
        self._flushing = False
        for member, calls in submits.items():
            self._links.send_calls(member, calls)
        for member, ids in cancels.items():
            self._links.send(member, [encode(Cancel(ids))])
        self._set_timer()
        if self._idle is not None and not fabric.calls:
            idle, self._idle = self._idle, None
            idle.set_result(None)

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


def _fail(call: Call, error: Exception) -> None:
    """Fail the call whose reply raised an error. The error is a bug, but other calls continue."""
    logger.error("the answer to %s could not be processed", call.endpoint, exc_info=error)
    failure = SglrlError(
        f"the answer to {call.endpoint} could not be processed: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    try:
        call.reply.end(call, failure, ())
    except Exception:
        logger.exception("the caller of %s could not be notified", call.endpoint)
