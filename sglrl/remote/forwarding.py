"""Send remote clients the answers of their calls.

``remote/admission.py`` makes the calls. ``remote/server.py`` accepts and removes the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ..config import DROPPED_AT
from ..core.calls import Call
from ..core.clients import ClientState
from ..core.prefixes import Route
from ..driver.driver import Driver, now
from ..errors import MessageTooLarge, ProtocolError, SglrlError
from ..inference.replies import chunk_of, resume
from ..wire.calls import ErrorBody, Item, ItemKind
from ..wire.codec import Buffer, encode
from ..wire.engine import TokenChunk
from ..wire.remote import Answers, PoolStatus

NEWS_SECONDS: Final = 0.1
"""Minimum seconds between two reports of the engines' load to a busy client."""
_KNOWN_CONVERSATIONS: Final = 1 << 14
"""Minimum number of recent conversations to keep for each client. The maximum is twice as many."""

Part = tuple[Any, ...]
"""A tuple in the layout of ``Answer``, or of its first four fields."""
_KIND: Final = 1
_FRAMES: Final = 3


class Peer:
    """A remote client with its running calls and its unsent answers.

    Args:
        max_bytes: the size of the largest frame that the client accepts.
        state: the state of the client in the fabric.
    """

    def __init__(self, identity: bytes, max_bytes: int, state: ClientState) -> None:
        self.identity = identity
        self.state = state
        self.sent = self.read = 0
        """The bytes that were sent to the client, and the bytes that it has reported as read."""
        self.max_bytes = max_bytes
        self.calls: dict[int, Call] = {}
        self.conversations: dict[int, Route] = {}
        """The routes of recent conversations, by the numbers that the client gives them."""
        self.silent: dict[int, Route] = {}
        """The routes of conversations without a turn since ``conversations`` was last emptied."""
        self.tasks: dict[int, Any] = {}
        """Running operations by the ids of their requests."""
        self.items: list[Part] = []
        self.again: list[int] = []
        self.frames: list[Buffer] = []
        self.told = 0.0

    def conversation(self, number: int) -> Route:
        """Return the route for the next turn of a conversation.

        If the previous turn is known and has ended, its route is used again. Otherwise the result
        is a new route.
        """
        route = self.conversations.get(number)
        if route is None:
            route = self.silent.pop(number, None)
            if route is None:
                route = Route(b"")
            if len(self.conversations) >= _KNOWN_CONVERSATIONS:
                self.silent, self.conversations = self.conversations, {}
            self.conversations[number] = route
        if route.tokens:
            self.conversations[number] = route = Route(b"")
        return route


class ForwardingReply:
    """The ``Reply`` of a call from a client in another process.

    Attributes:
        conversation: the route of the conversation that the call belongs to, or None.
        begun: the chunks received so far, from which another worker can continue, or None.
    """

    __slots__ = ("begun", "conversation", "id", "peer", "relay", "resumable")

    def __init__(self, relay: Relay, peer: Peer, id_: int, resumable: bool) -> None:
        self.relay = relay
        self.peer = peer
        self.id = id_
        self.resumable = resumable
        self.conversation: Route | None = None
        self.begun: list[TokenChunk] | None = None

    def let_go(self) -> None:
        """Release the call's route."""
        route = self.conversation
        if route is not None:
            # No turn of the conversation runs, so its route need not keep the tokens.
            route.tokens = b""
            self.conversation = None

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.resumable:
            try:
                chunk = chunk_of(item)
            except ProtocolError:
                # Forward the malformed chunk. The client raises the error.
                self.resumable = False
            else:
                if self.begun is None:
                    self.begun = []
                self.begun.append(chunk)
        self.relay.put(self.peer, (self.id, item.kind, item.body, item.frames), frames)

    def restart(self, call: Call) -> None:
        if self.begun is not None:
            # Send the chunks received so far first.
            self.relay.flush(self.peer)
            self.peer.again.append(self.id)
            resume(call, self.begun)

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        self.let_go()
        self.peer.calls.pop(self.id, None)
        if isinstance(outcome, Item):
            part = _part(self.id, outcome.kind, outcome.body, outcome.frames, call)
            self.relay.put(self.peer, part, frames)
        else:
            self.relay.fail(self.peer, self.id, outcome, call)


def _part(id_: int, kind: int, body: bytes, frames: int, call: Call) -> Part:
    worker, begun = call.worker, call.submitted_at
    if worker is None:
        return (id_, kind, body, frames)
    queued, first = call.sent_at - begun, call.first_at - begun
    return (
        id_,
        kind,
        body,
        frames,
        worker.index,
        call.attempts,
        queued if queued > 0.0 else 0.0,
        first if first > 0.0 else 0.0,
    )


class Relay:
    """Sends the answers of one driver to its remote clients.

    Args:
        driver: the driver whose transport sends the answers.
        status: returns the pool's status.
        on_lost: called with a client that cannot receive messages any more.
    """

    def __init__(
        self, driver: Driver, status: Callable[[], PoolStatus], on_lost: Callable[[Peer], None]
    ) -> None:
        self._driver = driver
        self._status = status
        self._on_lost = on_lost
        self._unsent: dict[Peer, None] = {}
        self._flush_scheduled = False
        most = max(driver.fabric.config.max_unread_bytes, driver.max_message_bytes)
        self._max_unread = DROPPED_AT * most

    def put(self, peer: Peer, item: Part, frames: Sequence[Buffer]) -> None:
        """Queue an item for the client. All items of one loop tick are sent in one message."""
        peer.items.append(item)
        if frames:
            peer.frames.extend(frames)
        self._unsent[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._driver.loop.call_soon(self._flush_all)

    def fail(self, peer: Peer, id_: int, error: SglrlError, call: Call | None = None) -> None:
        wire_error = ErrorBody(type(error).__name__, error.message, getattr(error, "traceback", ""))
        body = encode(wire_error)
        if call is None:
            self.put(peer, (id_, ItemKind.FAILED, body, 0), ())
        else:
            self.put(peer, _part(id_, ItemKind.FAILED, body, 0, call), ())

    def flush(self, peer: Peer) -> None:
        self._unsent.pop(peer, None)
        if not peer.items and not peer.again:
            return
        items, peer.items = peer.items, []
        again, peer.again = peer.again, []
        frames, peer.frames = peer.frames, []
        status: PoolStatus | None = None
        if now() - peer.told > NEWS_SECONDS:
            status = self._status()
            peer.told = now()
        self._send_answers(peer, items, again, frames, status)

    def send(self, peer: Peer, body: bytes, frames: Sequence[Buffer] = ()) -> None:
        """Send one message.

        Drop the client if it is unreachable or has left too many bytes unread.
        """
        if not self._driver.send_to_peer(peer.identity, body, *frames):
            self._on_lost(peer)
            return
        size = len(body)
        for frame in frames:
            size += len(frame)
        peer.sent += size
        peer.state.unread += size
        if peer.sent - peer.read > self._max_unread:
            self._on_lost(peer)

    def read_so_far(self, peer: Peer, size: int) -> bool:
        """Record how many bytes the client has read. Return False if the number is impossible."""
        if not peer.read <= size <= peer.sent:
            return False
        more, peer.read = size - peer.read, size
        self._driver.fabric.read_by_client(peer.state, more, now())
        self._driver.flush_soon()
        return True

    def forget(self, peer: Peer) -> None:
        """Remove a client and cancel its calls."""
        self._unsent.pop(peer, None)
        for call in peer.calls.values():
            self._driver.cancel(call)
        self._driver.fabric.queue.drop(peer.state)
        for task in peer.tasks.values():
            task.cancel()
        peer.calls.clear()
        peer.tasks.clear()
        peer.conversations.clear()
        peer.silent.clear()

    def cancel(self, peer: Peer, id_: int) -> None:
        call = peer.calls.pop(id_, None)
        task = peer.tasks.pop(id_, None)
        if call is not None:
            self._driver.cancel(call)
            call.reply.let_go()
        elif task is not None:
            task.cancel()
        else:
            return
        self.put(peer, (id_, ItemKind.CANCELLED, b"\xc0", 0), ())

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for peer in list(self._unsent):
            self.flush(peer)

    def _send_answers(
        self,
        peer: Peer,
        items: list[Part],
        again: list[int],
        frames: list[Buffer],
        status: PoolStatus | None,
    ) -> None:
        body = encode(Answers(items, again, status))  # type: ignore[arg-type]
        largest = max(len(body), *map(len, frames)) if frames else len(body)
        if largest > peer.max_bytes and len(items) > 1:
            half = len(items) // 2
            count = sum(item[_FRAMES] for item in items[:half])
            self._send_answers(peer, items[:half], again, frames[:count], status)
            self._send_answers(peer, items[half:], [], frames[count:], None)
        elif largest > peer.max_bytes and items and items[0][_KIND] != ItemKind.FAILED:
            what = (
                f"the answer has {largest:,} bytes, of at most {peer.max_bytes:,} that fit one "
                "message of this client (max_message_bytes)"
            )
            body = encode(ErrorBody(MessageTooLarge.__name__, what, ""))
            id_, kind, _, _, *end = items[0]
            if kind == ItemKind.CHUNK:
                # For the client, the call ends with this error.
                self.cancel(peer, id_)
            item = (id_, ItemKind.FAILED, body, 0, *end)
            self._send_answers(peer, [item], again, [], status)
        else:
            self.send(peer, body, frames)
