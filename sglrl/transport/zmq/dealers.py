"""A peer's socket: a DEALER, on an event loop or polled by a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Final, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...errors import Closed, UsageError
from ...wire.processes import ClientKeys
from ..base import Frame, OnWorkerMessage
from ..system_limits import start_thread
from .pump import Pump, close_with
from .sockets import Socket, close_socket, open_socket, send_frames

_RECONNECT_SECONDS: Final = 1.0
"""Seconds before ZeroMQ reconnects, for a dealer with ``on_break``. This must be longer than the
other end takes to shut down after it has broken the connection."""
_CONNECT_MS: Final = 3000
"""Milliseconds of one attempt to connect. In a longer attempt, the kernel would wait longer and
longer between its packets, and so notice late that a network link works again."""


class ZmqDealer(Pump):
    """A worker's end on an event loop (``WorkerTransport``).

    ZeroMQ reconnects by itself after a break. It does not report messages that the break has lost,
    for example in the middle of a stream.

    Args:
        address: the address of the router.
        identity: the name of this peer at the router.
        max_message_bytes: the connection is closed if it receives a larger message.
        keys: the keys of the connection. None: the connection is not encrypted.
        on_break: is called on a separate thread when the connection breaks.
        heartbeat_timeout: close a TCP connection on which nothing arrives for this number of
            seconds. None: never.
        reconnect_seconds: seconds before ZeroMQ reconnects. Ignored without ``on_break``.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        max_message_bytes: int,
        keys: ClientKeys | None = None,
        on_break: Callable[[], None] | None = None,
        heartbeat_timeout: float | None = None,
        reconnect_seconds: float = _RECONNECT_SECONDS,
    ) -> None:
        settings = DealerSettings(
            address, identity, max_message_bytes, keys, heartbeat_timeout, reconnect_seconds
        )
        super().__init__(_connect(settings, on_break))
        close_with(self, self.socket)
        self._on_message: OnWorkerMessage | None = None

    def start(self, on_message: OnWorkerMessage) -> None:
        self._on_message = on_message
        self.begin()

    def handle(self, frames: list[Any]) -> None:
        assert self._on_message is not None
        self._on_message(frames)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.closed:
            raise Closed("the transport is closed")
        try:
            send_frames(self.socket, frames)
        except zmq.Again:
            # The queue has no limit, so this error means that the driver refused the connection.
            raise Closed("the driver has refused the connection") from None
        self.check_soon()


class ZmqPolledDealer:
    """A worker's end without an event loop, for a thread that polls it between other work.

    The engine's scheduler loop uses it. Only the thread that created it may use it, except for
    ``wake``. The arguments are the same as for ``ZmqDealer``.
    """

    def __init__(
        self,
        address: str,
        identity: bytes,
        *,
        max_message_bytes: int,
        keys: ClientKeys | None = None,
        on_break: Callable[[], None] | None = None,
        heartbeat_timeout: float | None = None,
        reconnect_seconds: float = _RECONNECT_SECONDS,
    ) -> None:
        self._settings = DealerSettings(
            address, identity, max_message_bytes, keys, heartbeat_timeout, reconnect_seconds
        )
        self._socket = _connect(self._settings, on_break)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    def wake(self) -> None:
        """End the current ``wait``, or the next one. Any thread may call this method."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup, 1)

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None if none has arrived. This never waits."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, timeout: float) -> bool:
        """Block until a message arrives, ``wake`` is called, or ``timeout`` seconds have passed.

        Returns:
            True if a message has arrived.
        """
        events = dict(self._poller.poll(ceil(timeout * 1000)))
        if self._wakeup in events:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wakeup)
        return self._socket in events

    def send(self, frames: Sequence[Frame]) -> None:
        send_frames(self._socket, frames)

    def reconnect(self, on_break: Callable[[], None] | None = None) -> None:
        """Drop all waiting messages, and open a new connection."""
        self._poller.unregister(self._socket)
        close_socket(self._socket)
        self._socket = _connect(self._settings, on_break)
        self._poller.register(self._socket, zmq.POLLIN)

    def close(self, linger: float = 0.0) -> None:
        """Close the socket.

        Args:
            linger: maximum seconds in which ZeroMQ sends the messages that are not sent yet.
        """
        close_socket(self._socket, linger)
        os.close(self._wakeup)


class DealerSettings(NamedTuple):
    """The arguments of ``ZmqDealer`` for a socket."""

    address: str
    identity: bytes
    max_message_bytes: int
    keys: ClientKeys | None
    heartbeat_timeout: float | None
    reconnect_seconds: float = _RECONNECT_SECONDS


def new_dealer(settings: DealerSettings) -> Socket:
    """Return a DEALER that is not connected."""
    keys = settings.keys
    socket = open_socket(
        zmq.Context.instance(),
        zmq.DEALER,
        settings.address,
        max_message_bytes=settings.max_message_bytes,
        heartbeat_timeout=settings.heartbeat_timeout,
    )
    try:
        socket.setsockopt(zmq.IDENTITY, settings.identity)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.driver.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    except BaseException:
        close_socket(socket)
        raise
    return socket


def _connect(settings: DealerSettings, on_break: Callable[[], None] | None) -> Socket:
    """Return a connected DEALER."""
    socket, address = new_dealer(settings), settings.address
    try:
        if on_break is not None:
            socket.setsockopt(zmq.RECONNECT_IVL, ceil(settings.reconnect_seconds * 1000))
            _watch(socket, on_break)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise UsageError(
                f"nothing can listen at {address!r}: {zmq.strerror(error.errno or 0)}"
            ) from None
    except BaseException:
        close_socket(socket)
        raise
    return socket


def _watch(socket: Socket, on_break: Callable[[], None]) -> None:
    """Start a thread that calls ``on_break`` when the connection breaks."""
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
    thread = threading.Thread(
        target=_await_break,
        args=(socket.get_monitor_socket(events), on_break),
        name="sglrl-connection",
        daemon=True,
    )
    start_thread(thread)


def _await_break(monitor: Socket, on_break: Callable[[], None]) -> None:
    with contextlib.suppress(zmq.ContextTerminated), monitor:
        # Read all events up to the last one, because closing the watched socket waits for this.
        while parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
            on_break()
