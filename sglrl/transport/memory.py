"""A transport within one process and one event loop, for tests and benchmarks.

As with real sockets, messages are delivered in a later tick of the event loop, not inside ``send``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from ..errors import Closed
from .base import Frame, OnBreak, OnDriverMessage, OnPause, OnWorkerMessage


class MemoryRouter:
    """The driver's end (``DriverTransport``). ``connect`` creates a worker's end.

    One callback per tick of the event loop delivers the messages of all workers.
    """

    def __init__(self) -> None:
        self.address = "memory"
        self._dealers: dict[bytes, MemoryDealer] = {}
        self._to_driver: deque[tuple[bytes, list[Frame]]] = deque()
        self._to_workers: deque[tuple[MemoryDealer, list[Frame]]] = deque()
        self._on_message: OnDriverMessage | None = None
        self._on_pause: OnPause | None = None
        self._on_break: OnBreak | None = None
        self._scheduled = False
        self._closed = False

    def connect(self, identity: bytes) -> MemoryDealer:
        dealer = MemoryDealer(self, identity)
        self._dealers[identity] = dealer
        return dealer

    def start(
        self,
        on_message: OnDriverMessage,
        on_pause: OnPause | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        self._on_message, self._on_pause, self._on_break = on_message, on_pause, on_break
        if self._to_driver:
            self._schedule()

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        if self._closed:
            raise Closed("the transport is closed")
        dealer = self._dealers.get(peer)
        if dealer is None:
            return False
        copied: list[Frame] = list(map(bytes, frames))
        if dealer.on_message is None:
            dealer.unread.append(copied)
        else:
            self._to_workers.append((dealer, copied))
            if not self._scheduled:
                self._schedule()
        return True

    def put(self, dealer: MemoryDealer, messages: Iterable[list[Frame]]) -> None:
        """Schedule messages for delivery to a worker that has started."""
        self._to_workers.extend((dealer, frames) for frames in messages)
        self._schedule()

    def take(self, identity: bytes, frames: list[Frame]) -> None:
        """Schedule a message of a worker for delivery to the driver."""
        if self._closed:
            return
        self._to_driver.append((identity, frames))
        if not self._scheduled and self._on_message is not None:
            self._schedule()

    def drop(self, identity: bytes, dealer: MemoryDealer) -> None:
        """Remove a worker's end that was closed. Do not remove a newer end with this identity."""
        if self._dealers.get(identity) is dealer:
            del self._dealers[identity]
            if self._on_break is not None and not self._closed:
                asyncio.get_running_loop().call_soon(self._on_break)

    def close(self) -> None:
        self._closed = True
        self._to_driver.clear()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        """Deliver the messages that were sent until now.

        If a receiver raises an exception, the remaining messages are delivered in the next tick.
        """
        self._scheduled = False
        workers, driver = len(self._to_workers), len(self._to_driver)
        try:
            for _ in range(workers):
                dealer, frames = self._to_workers.popleft()
                if dealer.on_message is not None:
                    dealer.on_message(frames)
            if self._on_message is not None and driver:
                try:
                    for _ in range(driver):
                        if self._closed:
                            return
                        self._on_message(*self._to_driver.popleft())
                finally:
                    if self._on_pause is not None and not self._closed:
                        self._on_pause()
        finally:
            if self._to_workers or (self._to_driver and self._on_message is not None):
                self._schedule()


class MemoryDealer:
    """A worker's end (``WorkerTransport``)."""

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        self.on_message: OnWorkerMessage | None = None
        self.unread: list[list[Frame]] = []
        """Messages that arrived before ``start``."""
        self.closed = False
        self._router = router
        self._identity = identity

    def start(self, on_message: OnWorkerMessage) -> None:
        self.on_message = on_message
        unread, self.unread = self.unread, []
        if unread:
            self._router.put(self, unread)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.closed:
            raise Closed("the transport is closed")
        self._router.take(self._identity, list(map(bytes, frames)))

    def close(self) -> None:
        self.closed = True
        self.on_message = None
        self._router.drop(self._identity, self)
