"""Both ends of the fabric in one process and one event loop: for tests and benchmarks.

A message is delivered in a later loop tick, never inside ``send``, as with real sockets.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import Closed
from .base import Frame, OnDriverMessage, OnPause, OnWorkerMessage


class _Inbox:
    """Messages on their way to one end, delivered in order and in a later tick of the loop."""

    def __init__(self, turn: _Turn) -> None:
        self._turn = turn
        self._waiting: list[tuple[Any, ...]] = []
        self._deliver_to: Callable[..., None] | None = None
        self._on_pause: OnPause | None = None
        self.closed = False

    def start(self, deliver_to: Callable[..., None], on_pause: OnPause | None) -> None:
        self._deliver_to = deliver_to
        self._on_pause = on_pause
        if self._waiting:
            self._turn.add(self)

    def put(self, *message: Any) -> None:
        if self.closed:
            return
        self._waiting.append(message)
        if len(self._waiting) == 1 and self._deliver_to is not None:
            self._turn.add(self)

    def close(self) -> None:
        self.closed = True
        self._waiting.clear()

    def deliver(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            for at, message in enumerate(waiting):
                if self.closed or self._deliver_to is None:
                    return
                try:
                    self._deliver_to(*message)
                except BaseException:
                    # The messages behind this one still arrive, and before any newer one.
                    if rest := waiting[at + 1 :]:
                        if not self._waiting:
                            self._turn.add(self)
                        self._waiting[:0] = rest
                    raise
        finally:
            if self._on_pause is not None and not self.closed:
                self._on_pause()


class _Turn:
    """The inboxes to deliver in the loop's next tick, by one callback however many they are."""

    def __init__(self) -> None:
        self._inboxes: deque[_Inbox] = deque()

    def add(self, inbox: _Inbox) -> None:
        if not self._inboxes:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._inboxes.append(inbox)

    def _deliver(self) -> None:
        inboxes, self._inboxes = self._inboxes, deque()
        try:
            while inboxes:
                inboxes.popleft().deliver()
        finally:
            # What an exception has left.
            for inbox in inboxes:
                self.add(inbox)


class MemoryRouter:
    """The driver's end (``DriverTransport``). ``connect`` makes a worker's end."""

    def __init__(self) -> None:
        self.address = "memory"
        self.turn = _Turn()
        self.inbox = _Inbox(self.turn)
        self._dealers: dict[bytes, MemoryDealer] = {}

    def connect(self, identity: bytes) -> MemoryDealer:
        dealer = MemoryDealer(self, identity)
        self._dealers[identity] = dealer
        return dealer

    def start(self, on_message: OnDriverMessage, on_pause: OnPause | None = None) -> None:
        self.inbox.start(on_message, on_pause)

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        if self.inbox.closed:
            raise Closed("the transport is closed")
        dealer = self._dealers.get(peer)
        if dealer is None:
            return False
        dealer.inbox.put([bytes(f) for f in frames])
        return True

    def drop(self, identity: bytes, dealer: MemoryDealer) -> None:
        """The worker's end was closed; a newer one of the same identity stays."""
        if self._dealers.get(identity) is dealer:
            del self._dealers[identity]

    def close(self) -> None:
        self.inbox.close()


class MemoryDealer:
    """A worker's end (``WorkerTransport``)."""

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        self.inbox = _Inbox(router.turn)
        self._router = router
        self._identity = identity

    def start(self, on_message: OnWorkerMessage) -> None:
        self.inbox.start(on_message, None)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.inbox.closed:
            raise Closed("the transport is closed")
        self._router.inbox.put(self._identity, [bytes(f) for f in frames])

    def close(self) -> None:
        self.inbox.close()
        self._router.drop(self._identity, self)
