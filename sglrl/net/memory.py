"""Both ends of the fabric in one process and one event loop: for tests and benchmarks.

A message is delivered in a later loop tick, never inside ``send``, as with real sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..errors import Closed
from .base import Frame, OnDriverMessage, OnPause, OnWorkerMessage


class MemoryRouter:
    """The driver's end (``DriverTransport``). ``connect`` makes a worker's end."""

    def __init__(self) -> None:
        self.address = "memory"
        self._on_message: OnDriverMessage | None = None
        self._on_pause: OnPause | None = None
        self._dealers: dict[bytes, MemoryDealer] = {}
        self._inbox: list[tuple[bytes, list[bytes]]] = []
        self._closed = False

    def connect(self, identity: bytes) -> MemoryDealer:
        dealer = MemoryDealer(self, identity)
        self._dealers[identity] = dealer
        return dealer

    def start(self, on_message: OnDriverMessage, on_pause: OnPause | None = None) -> None:
        self._on_message = on_message
        self._on_pause = on_pause
        if self._inbox:
            asyncio.get_running_loop().call_soon(self._deliver)

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        if self._closed:
            raise Closed("the transport is closed")
        dealer = self._dealers.get(peer)
        if dealer is None:
            return False
        dealer.push([bytes(f) for f in frames])
        return True

    def push(self, identity: bytes, frames: list[bytes]) -> None:
        """A worker's message; used by ``MemoryDealer``."""
        if self._closed:
            return
        self._inbox.append((identity, frames))
        if len(self._inbox) == 1 and self._on_message is not None:
            asyncio.get_running_loop().call_soon(self._deliver)

    def drop(self, identity: bytes, dealer: MemoryDealer) -> None:
        """The worker's end was closed; a newer one of the same identity stays."""
        if self._dealers.get(identity) is dealer:
            del self._dealers[identity]

    def _deliver(self) -> None:
        inbox, self._inbox = self._inbox, []
        try:
            for at, (identity, frames) in enumerate(inbox):
                if self._closed or self._on_message is None:
                    return
                try:
                    self._on_message(identity, frames)
                except BaseException:
                    # The messages behind this one still arrive, and before any newer one.
                    if rest := inbox[at + 1 :]:
                        if not self._inbox:
                            asyncio.get_running_loop().call_soon(self._deliver)
                        self._inbox[:0] = rest
                    raise
        finally:
            if self._on_pause is not None and not self._closed:
                self._on_pause()

    def close(self) -> None:
        self._closed = True
        self._inbox.clear()


class MemoryDealer:
    """A worker's end (``WorkerTransport``)."""

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        self._router = router
        self._identity = identity
        self._on_message: OnWorkerMessage | None = None
        self._inbox: list[list[bytes]] = []
        self._closed = False

    def start(self, on_message: OnWorkerMessage) -> None:
        self._on_message = on_message
        if self._inbox:
            asyncio.get_running_loop().call_soon(self._deliver)

    def send(self, frames: Sequence[Frame]) -> None:
        if self._closed:
            raise Closed("the transport is closed")
        self._router.push(self._identity, [bytes(f) for f in frames])

    def push(self, frames: list[bytes]) -> None:
        """The driver's message; used by ``MemoryRouter``."""
        self._inbox.append(frames)
        if len(self._inbox) == 1 and self._on_message is not None:
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        inbox, self._inbox = self._inbox, []
        for at, frames in enumerate(inbox):
            if self._closed or self._on_message is None:
                return
            try:
                self._on_message(frames)
            except BaseException:
                # The messages behind this one still arrive, and before any newer one.
                if rest := inbox[at + 1 :]:
                    if not self._inbox:
                        asyncio.get_running_loop().call_soon(self._deliver)
                    self._inbox[:0] = rest
                raise

    def close(self) -> None:
        self._closed = True
        self._inbox.clear()
        self._router.drop(self._identity, self)
