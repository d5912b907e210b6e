"""The replies of actor calls, which decode results and pass them to the waiting coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..core.calls import Call
from ..errors import DRIVER_ERRORS, Overloaded, ProtocolError, SglrlError, from_wire
from ..wire.calls import ErrorBody, Item, ItemKind
from ..wire.codec import Buffer, Result

MAX_UNREAD_ITEMS = 1 << 16
MAX_UNREAD_BYTES = 256 << 20
"""Maximum encoded bytes of a stream's unread items. A stream that exceeds this limit or
``MAX_UNREAD_ITEMS`` ends with ``Overloaded``, before its items fill the driver's memory."""

_error_body = Result(ErrorBody)
_cancelled = "the worker gave the call up; it was cancelled there"


class UnaryReply:
    """The reply of a unary call, which sets a future to the result."""

    __slots__ = ("future", "result")

    def __init__(self, future: asyncio.Future[Any], result: Result) -> None:
        self.future = future
        self.result = result

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """Ignore the chunk, because a unary endpoint sends no chunks."""

    def restart(self, call: Call) -> None:
        """Do nothing, because no part of the result was received."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        if self.future.done():
            return
        try:
            value = decode_outcome(self.result, outcome, frames)
        except SglrlError as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class StreamReply:
    """The reply of a stream, which queues the items for the single coroutine that reads them.

    Attributes:
        give_up: is called once to cancel the call, if too many items are unread or an item is
            malformed.
    """

    __slots__ = ("done", "error", "give_up", "items", "result", "unread", "waiter")

    def __init__(self, result: Result) -> None:
        self.result = result
        self.items: deque[tuple[Any, int]] = deque()
        self.unread = 0
        self.give_up: Callable[[], None] = lambda: None
        self.done = False
        self.error: SglrlError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.done:
            return
        size = len(item.body) + sum(map(len, frames))
        try:
            self.items.append((self.result.decode(item.body, frames), size))
        except SglrlError as error:
            self.error = error
            self.done = True
            self.give_up()
            self._wake()
            return
        self.unread += size
        if len(self.items) > MAX_UNREAD_ITEMS or self.unread > MAX_UNREAD_BYTES:
            self.error = Overloaded(
                f"{len(self.items):,} items of this stream were not read ({self.unread:,} bytes); "
                "read it faster, or have the actor yield less"
            )
            self.done = True
            self.give_up()
        self._wake()

    def restart(self, call: Call) -> None:
        """Do nothing, because a stream restarts only before its first chunk."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        if self.done:
            # The stream has ended early, because of a malformed item or too many unread items.
            return
        if isinstance(outcome, SglrlError):
            self.error = outcome
        elif outcome.kind != ItemKind.DONE:
            self.error = error_of(outcome)
        self.done = True
        self._wake()

    async def next(self) -> tuple[bool, Any]:
        """Return ``(True, item)``, or ``(False, None)`` at the end of the stream.

        Raises:
            SglrlError: the error that ended the stream.
        """
        while not self.items:
            if self.done:
                if self.error is not None:
                    raise self.error
                return False, None
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        item, size = self.items.popleft()
        self.unread -= size
        return True, item


def decode_outcome(result: Result, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> Any:
    """Return the result of a finished call.

    Raises:
        SglrlError: the call ended with an error.
    """
    if isinstance(outcome, SglrlError):
        raise outcome
    if outcome.kind != ItemKind.DONE:
        raise error_of(outcome)
    return result.decode(outcome.body, frames)


def error_of(item: Item) -> SglrlError:
    """Return the exception for an ERROR, FAILED or CANCELLED item."""
    if item.kind == ItemKind.CANCELLED:
        return from_wire("EngineError", _cancelled, "")
    try:
        body: ErrorBody = _error_body.decode(item.body)
    except ProtocolError as error:
        return error
    if item.kind == ItemKind.FAILED and body.kind in DRIVER_ERRORS:
        return DRIVER_ERRORS[body.kind](body.message)
    return from_wire(body.kind, body.message, body.traceback)
