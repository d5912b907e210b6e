"""ZeroMQ ROUTER/DEALER. The only module that imports zmq.

On an event loop the socket's file descriptor is watched and drained without blocking. That
descriptor is edge-triggered, and *any* operation on the socket may consume its edge: so after
every burst of sends the socket is asked once whether something arrived meanwhile
(http://api.zeromq.org/4-3:zmq-getsockopt, ZMQ_FD). A receive is never cancelled or timed out, so
no message can be lost between two owners.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from math import ceil
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..errors import Closed, UsageError
from .base import Frame, OnDriverMessage, OnPause, OnWorkerMessage

_BATCH: Final = 128
"""Messages handled in one callback before the loop gets its turn."""
_COPY_THRESHOLD: Final = 64 << 10
"""Frames larger than this are handed to ZeroMQ without a copy."""
_RECONNECT_MS: Final = 1000
"""Where a broken connection is told: more than the end of what it breaks for may take."""


def _is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        # A name or an interface: what it stands for is not for us to guess.
        return False


def _check_address(address: str) -> None:
    if address.startswith("ipc://"):
        return
    if address.startswith("tcp://"):
        if _is_loopback(address):
            return
        raise UsageError(
            f"{address} is not a loopback address; without encryption and keys sglrl listens on "
            "ipc and on 127.0.0.1 only"
        )
    raise UsageError(f"unknown address {address!r}; use ipc://PATH or tcp://127.0.0.1:*")


def _socket(kind: int, max_message_bytes: int) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    # The fabric's window bounds what is in flight; a high-water mark here would drop or block.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    return socket


def _send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        flags = zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0)
        socket.send(frame, flags, copy=len(frame) < _COPY_THRESHOLD)


def _dealer(
    address: str, identity: bytes, max_message_bytes: int, on_break: Callable[[], None] | None
) -> zmq.Socket[bytes]:
    """A connected DEALER. ``on_break``: called, on a thread of its own, when the other side is
    suddenly gone. ZeroMQ connects again by itself, and what was under way then is lost unnoticed:
    in the middle of a stream, say."""
    socket = _socket(zmq.DEALER, max_message_bytes)
    socket.setsockopt(zmq.IDENTITY, identity)
    if on_break is not None:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        threading.Thread(
            target=_await_break,
            args=(socket.get_monitor_socket(events), on_break),
            name="sglrl-connection",
            daemon=True,
        ).start()
    socket.connect(address)
    return socket


def _await_break(monitor: zmq.Socket[bytes], on_break: Callable[[], None]) -> None:
    with contextlib.suppress(zmq.ContextTerminated), monitor:
        if parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
            on_break()


def _end(socket: zmq.Socket[bytes], linger: float) -> None:
    # The thread that waits for events, if there is one, is told.
    socket.disable_monitor()
    socket.close(int(linger * 1000))


class _Pump:
    """Drains a socket on the running loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.loop: asyncio.AbstractEventLoop | None = None
        self.scheduled = False
        self.closed = False
        self.on_pause: OnPause | None = None

    def begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.socket.fileno(), self.drain)
        self.schedule()

    def schedule(self) -> None:
        if not self.scheduled and self.loop is not None:
            self.scheduled = True
            self.loop.call_soon(self.drain)

    def after_send(self) -> None:
        """The send may have swallowed the edge that announces an arrival."""
        if self.loop is not None and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self.schedule()

    def drain(self) -> None:
        self.scheduled = False
        if self.closed:
            return
        receive = self.socket.recv_multipart
        # Set first: if the callback raises, the messages behind this one must not wait for an edge
        # that has gone.
        more = True
        try:
            for _ in range(_BATCH):
                try:
                    frames = receive(zmq.NOBLOCK)
                except zmq.Again:
                    more = False
                    return
                self.handle(frames)
                if self.closed:
                    return
        finally:
            if more and not self.closed:
                self.schedule()
            if self.on_pause is not None and not self.closed:
                self.on_pause()

    def handle(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.socket.fileno())
        _end(self.socket, 0)


class ZmqRouter(_Pump):
    """The driver's end (``DriverTransport``). ``address`` is where workers connect to."""

    def __init__(self, address: str, *, max_message_bytes: int) -> None:
        _check_address(address)
        super().__init__(_socket(zmq.ROUTER, max_message_bytes))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(address)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._on_message: OnDriverMessage | None = None

    def start(self, on_message: OnDriverMessage, on_pause: OnPause | None = None) -> None:
        self._on_message = on_message
        self.on_pause = on_pause
        self.begin()

    def handle(self, frames: list[bytes]) -> None:
        assert self._on_message is not None
        self._on_message(frames[0], frames[1:])

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        if self.closed:
            raise Closed("the transport is closed")
        try:
            _send(self.socket, [peer, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        self.after_send()
        return True


class ZmqDealer(_Pump):
    """A worker's end on an event loop (``WorkerTransport``)."""

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        max_message_bytes: int,
        on_break: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(_dealer(address, identity, max_message_bytes, on_break))
        self._on_message: OnWorkerMessage | None = None

    def start(self, on_message: OnWorkerMessage) -> None:
        self._on_message = on_message
        self.begin()

    def handle(self, frames: list[bytes]) -> None:
        assert self._on_message is not None
        self._on_message(frames)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.closed:
            raise Closed("the transport is closed")
        _send(self.socket, frames)
        self.after_send()


class ZmqPolledDealer:
    """A worker's end without an event loop, polled by a thread that has better things to do: the
    engine's scheduler loop. Belongs to the thread that made it."""

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        max_message_bytes: int,
        on_break: Callable[[], None] | None = None,
    ) -> None:
        self._socket = _dealer(address, identity, max_message_bytes, on_break)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    def wake(self) -> None:
        """End the ``wait`` under way, or the next one. The one method for other threads."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup, 1)

    def receive(self) -> list[bytes] | None:
        """The next message if one is here, else None; never waits."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, timeout: float) -> bool:
        """Block until a message is here, ``wake`` is called, or ``timeout`` seconds have passed.
        True if a message is here."""
        events = dict(self._poller.poll(ceil(timeout * 1000)))
        if self._wakeup in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
        return self._socket in events

    def send(self, frames: Sequence[Frame]) -> None:
        _send(self._socket, frames)

    def close(self, linger: float = 0.0) -> None:
        """``linger``: seconds that unsent messages may take to leave."""
        _end(self._socket, linger)
        os.close(self._wakeup)
