"""The driver of a client whose pool is in another process (``remote/client.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from ..config import MIN_UNREAD_BYTES, FabricConfig
from ..core.calls import Call
from ..core.effects import Restart
from ..core.members import READY, RETIRED, Member
from ..driver.driver import Driver, now
from ..errors import Closed, ProtocolError
from ..transport.base import OnBreak, OnDriverMessage, OnPause
from ..transport.zmq import ZmqDealer
from ..wire.codec import Buffer, decode_to_client, encode, split_frames
from ..wire.remote import Answers, BytesRead, PoolStatus, Rejected, Requests, Welcome

_ANY_NUMBER: Final = 1 << 62
_MANY: Final = 64
_REPORT_BYTES: Final = MIN_UNREAD_BYTES // 4
_APART: Final = 0.001
"""Minimum seconds between two messages to the pool while many calls are pending. Fewer messages
save time in the pool's process, which serves all clients: a message costs as much as several calls.
"""


class PoolConnection:
    """The connection to the pool's process, as a ``DriverTransport``."""

    def __init__(self, dealer: ZmqDealer, address: str) -> None:
        self._dealer = dealer
        self.address = address

    def start(
        self,
        on_message: OnDriverMessage,
        on_pause: OnPause | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        """Start to deliver messages to ``on_message``.

        ``on_break`` is never called, because the dealer notifies ``RemotePool`` itself.
        """
        self._dealer.on_pause = on_pause
        self._dealer.start(partial(on_message, b""))

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> bool:
        self._dealer.send(frames)
        return True

    def close(self) -> None:
        self._dealer.close()


class RemoteDriver(Driver):
    """A ``Driver`` whose only worker is the pool of another process.

    Attributes:
        admitted: a future with the first answer of the pool.
        status: the latest status that the pool has sent.
        on_news: called when ``status`` changes.
    """

    def __init__(self, connection: PoolConnection, max_message_bytes: int) -> None:
        super().__init__(connection, FabricConfig(), max_message_bytes, self._encode_requests)
        self.admitted: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.status = PoolStatus(0, 0, [])
        self.on_news: Callable[[], None] = lambda: None
        self._read = self._reported = 0
        """The bytes of messages that were read, and the bytes that were reported as read."""
        self._names: dict[int, Member] = {}
        self._conversations = 0
        self._sent_at = 0.0
        self.workers.add(0, b"")
        self._pool = self.fabric.members[0]

    def submit(self, call: Call) -> None:
        # The caller names a worker of the pool. It is sent in the request (``target``), because
        # ``pinned`` names a worker of this driver, which has only one.
        call.target, call.pinned = call.pinned, None
        super().submit(call)

    def capacity(self, worker: int | None) -> tuple[int, int]:
        windows = [
            status.window
            for status in self.status.workers
            if status.state != RETIRED and worker in (None, status.id)
        ]
        # Calls wait in the pool's own driver, so the queue's limit is the limit there.
        return sum(windows), self.admitted.result().max_queue

    @property
    def ready(self) -> list[int]:
        return [] if self.fabric.closed else [w.id for w in self.status.workers if w.state == READY]

    def lose(self, reason: str) -> None:
        """Close this driver because no more answers will arrive."""
        if not self.admitted.done():
            self.admitted.set_exception(Closed(reason))
        self.close(reason)

    def _on_message(self, identity: bytes, frames: list[Buffer]) -> None:
        for frame in frames:
            self._read += len(frame)
        if self._read - self._reported >= _REPORT_BYTES:
            self._reported = self._read
            self.send_to_peer(b"", encode(BytesRead(self._read)))
        try:
            message = decode_to_client(frames[0])
        except (ProtocolError, IndexError) as error:
            self.dropped("a message of the pool: %s", error)
            return
        match message:
            case Answers():
                self._on_answers(message, frames)
            case Welcome() if not self.admitted.done():
                self.fabric.member_ready(0, _ANY_NUMBER, now())
                self.status = message.status
                self.admitted.set_result(message)
            case Rejected(reason=reason):
                self.lose(f"the pool dismissed this client ({reason})")
            case _:
                # Do not log the fields, because an address in them contains a secret.
                self.dropped("the pool sent %s out of place", type(message).__name__)

    def _on_answers(self, answers: Answers, frames: list[Buffer]) -> None:
        if len(frames) > 1:
            try:
                owned = split_frames(answers.items, frames)
            except ProtocolError as error:
                self.dropped("a message of the pool: %s", error)
                return
            self._raw |= zip(map(id, answers.items), owned, strict=True)
        held = self._pool.calls
        for id_ in answers.again:
            call = held.get(id_)
            if call is not None:
                self.fabric.outbox.append(Restart(call))
        for answer in answers.items:
            if answer.worker >= 0 and (call := held.get(answer.id)) is not None:
                call.worker = self._names.setdefault(answer.worker, Member(answer.worker))
                call.attempts = answer.attempts
                call.sent_at = call.submitted_at + answer.queued
                call.first_at = call.submitted_at + answer.first if answer.first else 0.0
        self.fabric.results(self._pool, answers.items, now())
        if answers.status is not None:
            self.status = answers.status
            for listener in self._listeners:
                listener.on_loads()
            self.on_news()

    def _end_of_turn(self) -> None:
        at = now()
        wait = self._sent_at + _APART - at
        if wait > 0 and len(self.fabric.calls) >= _MANY:
            self.loop.call_later(wait, self._end_of_turn)
            return
        self._sent_at = at
        super()._end_of_turn()

    def _encode_requests(self, calls: list[Call]) -> list[Any]:
        requests: list[Any] = [self._request(call) for call in calls]
        return [encode(Requests(requests))]

    def _request(self, call: Call) -> tuple[Any, ...]:
        """Return a call as a tuple in the layout of ``Request``.

        The arguments are not encoded here. The pool decodes them only after it has read the
        endpoint, so there they are raw bytes.
        """
        route, session, number = call.route, None, -1
        if route is not None:
            session = route.session
            if route.sticky and session is None:
                # The pool uses this number to find the worker of the conversation's previous turn.
                if route.number < 0:
                    self._conversations += 1
                    route.number = self._conversations
                number = route.number
        timeout = None if call.deadline is None else call.deadline - now()
        return (
            call.id,
            call.endpoint,
            call.args,
            timeout,
            call.priority,
            call.target,
            session,
            number,
        )
