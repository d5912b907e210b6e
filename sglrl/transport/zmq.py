"""ZeroMQ ROUTER/DEALER. The only module that imports zmq.

The event loop watches the socket's file descriptor, and the socket is drained without blocking. The
descriptor is edge-triggered, and *any* operation on the socket may consume its edge. After every
burst of sends, the socket is therefore checked once for messages that arrived meanwhile
(http://api.zeromq.org/4-3:zmq-getsockopt, ZMQ_FD). A receive is never cancelled or timed out, so
no message can be lost between two owners.

With keys, a connection is encrypted and both ends authenticate (CURVE). A peer with an unknown key
is refused before any of its messages is read, even if no handler answers ZeroMQ's question.

Over tcp both ends send heartbeats (``heartbeat_timeout``) from ZeroMQ's own thread. When nothing
arrives on a connection for this time, the end that notices closes the connection. The effect is the
same as if the other end had closed it: a DEALER calls ``on_break``; a ROUTER calls the driver's
``on_break`` and forgets the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket as sockets
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from math import ceil
from typing import Any, Final
from weakref import WeakSet, finalize

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from ..errors import Closed, UsageError
from ..system_limits import check_threads, start_thread
from ..wire.processes import ClientKeys
from .base import MOST_UNREAD, DriverKeys, Frame, OnBreak, OnDriverMessage, OnPause, OnWorkerMessage
from .dropped import Dropped

logger = logging.getLogger("sglrl.transport")

_BATCH: Final = 128
"""Maximum number of messages handled in one callback before the loop runs other tasks."""
_BATCH_SECONDS: Final = 0.001
"""Maximum seconds of one callback, because a message may contain hundreds of answers."""
_COPIED_OUT: Final = 192 << 10
"""Larger frames are passed to ZeroMQ without a copy. For smaller frames, the thread in which pyzmq
releases them costs more than a copy."""
_COPIED_IN: Final = 64 << 10
"""Raw frames of at least this many bytes are read from ZeroMQ's own memory."""
# Use plain integers: with pyzmq's enums a message takes twice as long.
_LAST: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_RECONNECT_MS: Final = 1000
"""Milliseconds before ZeroMQ reconnects, for a dealer with ``on_break``. This must be longer than
the shutdown of the other end, which breaks the connection."""
_MOST_UNTAKEN: Final = 1 << 14
"""Maximum number of messages of one peer that wait at the driver. Further messages wait at the
peer, and are lost if the peer exits. While they wait there, ZeroMQ does not read heartbeats either:
a driver that is busy for longer than ``heartbeat_timeout`` must not reach this number."""
_DOMAIN: Final = b"sglrl"
_HANDSHAKE_MS: Final = 10_000
"""Milliseconds for a handshake. With keys it includes a question to the driver, which may be
busy."""
_GREETING_BYTES: Final = 64
_PLAIN_HANDSHAKE_BYTES: Final = _GREETING_BYTES + 27
"""Bytes of a greeting and the shortest READY command (https://rfc.zeromq.org/spec/23). A connection
that has sent less has not finished its handshake."""
_CURVE_HANDSHAKE_BYTES: Final = _GREETING_BYTES + 202 + 257
"""Bytes of a greeting, HELLO and the shortest INITIATE (https://rfc.zeromq.org/spec/26)."""
_EVENT: Final = struct.Struct("=HI")
_RECEIVED: Final = struct.Struct("=128xQ")
"""Extracts ``tcpi_bytes_received`` from ``struct tcp_info`` of linux/tcp.h."""
_THREADS: Final = 3
"""Threads that a context and a connection start. ZeroMQ aborts the process when it cannot start a
thread."""


def key_pair() -> tuple[str, str]:
    """Return a new public key and its secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def public_key(secret: str) -> str:
    """Return the public key of a secret key, in Z85."""
    return zmq.curve_public(secret.encode()).decode()


def _host(address: str) -> str:
    return address.removeprefix("tcp://").rsplit(":", 1)[0]


def _is_loopback(address: str) -> bool:
    host = _host(address).strip("[]")
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        # A host name or an interface, which may have any address.
        return False


def check_address(address: str, *, keys: bool = False, insecure: bool = False) -> None:
    """Raise ``UsageError`` unless sglrl may listen on an address, or connect to it.

    Args:
        keys: keys are given.
        insecure: keys are not required.
    """
    if address == "ipc" or address.startswith("ipc://"):
        if keys:
            raise UsageError("keys= is for tcp; an ipc socket is in a folder of your own already")
        return
    if address == "tcp" or address.startswith("tcp://"):
        if keys or insecure or address == "tcp" or _is_loopback(address):
            return
        raise UsageError(
            f"{address} is not a loopback address; connections beyond this machine need keys: "
            "make them with 'sglrl keys DIR' and pass keys='DIR' (insecure=True accepts any peer, "
            "unencrypted)"
        )
    raise UsageError(f"unknown address {address!r}; use ipc://PATH or tcp://127.0.0.1:*")


def _reachable(address: str, *, here: bool) -> str:
    """Return the address to connect to an end that listens on ``address``.

    Args:
        here: for connections from this machine. Otherwise the address is for other machines, and is
            a guess if the end listens on all interfaces.
    """
    for anywhere, loopback, family, away in (
        ("tcp://0.0.0.0:", "127.0.0.1", sockets.AF_INET, "192.0.2.1"),
        ("tcp://[::]:", "[::1]", sockets.AF_INET6, "2001:db8::1"),
    ):
        if address.startswith(anywhere):
            host = loopback
            if not here:
                # Sends no packet: the kernel only chooses the source address for a packet.
                with contextlib.suppress(OSError), sockets.socket(family, sockets.SOCK_DGRAM) as s:
                    s.connect((away, 9))
                    found = s.getsockname()[0]
                    host = f"[{found}]" if ":" in found else found
            return f"tcp://{host}:{address.removeprefix(anywhere)}"
    return address


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str, max_message_bytes: int
) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        # The fabric's window limits the pending messages. A high-water mark would drop or block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.IPV6, "[" in address)
    except BaseException:
        # A socket that is not closed would block the termination of its context for ever. The
        # caller has no reference to this socket.
        socket.close(0)
        raise
    return socket


def _set_heartbeat(socket: zmq.Socket[bytes], address: str, timeout: float | None) -> None:
    """Close a TCP connection on which nothing arrives for ``timeout`` seconds. None: never."""
    if timeout is None or not address.startswith("tcp://"):
        return
    milliseconds = ceil(timeout * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
    socket.setsockopt(zmq.HEARTBEAT_IVL, ceil(milliseconds / 4))
    # A heartbeat is sent after all earlier messages. If these fill the kernel's buffer, ZeroMQ
    # waits for room without a time limit; this sets the kernel's time limit. (HEARTBEAT_TTL is not
    # needed, because both ends send heartbeats. libzmq 4.3.5 computes it in 16 bits: it is wrong
    # from 65 s on.)
    socket.setsockopt(zmq.TCP_MAXRT, milliseconds)


def _send(socket: zmq.Socket[bytes], frames: Sequence[Frame]) -> None:
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        socket.send(frame, _MORE if i < last else _LAST, len(frame) <= _COPIED_OUT)


def _dealer(
    address: str,
    identity: bytes,
    max_message_bytes: int,
    keys: ClientKeys | None,
    on_break: Callable[[], None] | None,
    heartbeat_timeout: float | None,
) -> zmq.Socket[bytes]:
    """Return a connected DEALER.

    ZeroMQ reconnects by itself after a break. It does not report messages that are lost then, for
    example in the middle of a stream.

    Args:
        on_break: called on a separate thread when the connection breaks.
    """
    check_threads(_THREADS)
    socket = _socket(zmq.Context.instance(), zmq.DEALER, address, max_message_bytes)
    socket.setsockopt(zmq.IDENTITY, identity)
    _set_heartbeat(socket, address, heartbeat_timeout)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.driver.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    if on_break is not None:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        thread = threading.Thread(
            target=_await_break,
            args=(socket.get_monitor_socket(events), on_break),
            name="sglrl-connection",
            daemon=True,
        )
        try:
            start_thread(thread)
        except BaseException:
            _end(socket, 0)
            raise
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        _end(socket, 0)
        raise UsageError(
            f"there can be nobody at {address!r}: {zmq.strerror(error.errno or 0)}"
        ) from None
    return socket


def _await_break(monitor: zmq.Socket[bytes], on_break: Callable[[], None]) -> None:
    with contextlib.suppress(zmq.ContextTerminated), monitor:
        # Read up to the last event: closing the watched socket would wait until it is read.
        while parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED:
            on_break()


def _end(socket: zmq.Socket[bytes], linger: float) -> None:
    # This ends the thread that waits for events, if any.
    socket.disable_monitor()
    socket.close(int(linger * 1000))


def _end_unclosed(pump: _Pump, *owned: zmq.Socket[bytes] | zmq.Context[zmq.Socket[bytes]]) -> None:
    """Close sockets and contexts in this order when a pump is collected that was never closed.

    Otherwise the garbage collector may terminate the context before the sockets, which waits for
    ever. At interpreter exit nothing is closed: an event loop in another thread may still use the
    sockets.
    """
    finalize(pump, _end_in_order, owned, os.getpid()).atexit = False


def _end_in_order(
    owned: Sequence[zmq.Socket[bytes] | zmq.Context[zmq.Socket[bytes]]], pid: int
) -> None:
    # A forked process has copies. Only the parent closes them.
    if os.getpid() == pid:
        for one in owned:
            if isinstance(one, zmq.Context):
                one.destroy(0)
            elif not one.closed:
                _end(one, 0)


class _Pump:
    """Drains a socket on the running loop."""

    plain_frames = 1
    """Number of frames at the start of a message that are not raw frames."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.loop: asyncio.AbstractEventLoop | None = None
        self.scheduled = False
        self.closed = False
        self.on_pause: OnPause | None = None
        _pumps.add(self)

    def begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.add_reader(self.socket.fileno(), self.drain)
        self.schedule()

    def schedule(self) -> None:
        if not self.scheduled and self.loop is not None:
            self.scheduled = True
            self.loop.call_soon(self.drain)

    def after_send(self) -> None:
        """Check for messages at the end of the loop tick, once for all sends of the tick.

        A send may have consumed the edge that announces a message.
        """
        self.schedule()

    def drain(self) -> None:
        self.scheduled = False
        if self.closed:
            return
        receive, plain = self._receive, self.plain_frames
        # Set this first: if the callback raises, the following messages must not wait for an edge
        # that was already consumed.
        more = True
        end = time.monotonic() + _BATCH_SECONDS
        try:
            for _ in range(_BATCH):
                try:
                    frames = receive(plain)
                except zmq.Again:
                    more = False
                    return
                self.handle(frames)
                if self.closed or time.monotonic() > end:
                    return
        finally:
            if more and not self.closed:
                self.schedule()
            if self.on_pause is not None and not self.closed:
                self.on_pause()

    def _receive(self, plain: int) -> list[Frame]:
        """Return one message. Raise ``zmq.Again`` if none has arrived.

        Large raw frames, which follow the first ``plain`` frames, are views of ZeroMQ's own memory.
        A copy of half a megabyte takes longer than the rest of the processing of the frame.
        """
        socket = self.socket
        frames: list[Frame] = [socket.recv(_LAST)]
        while socket.getsockopt(_RCVMORE):
            if len(frames) < plain:
                frames.append(socket.recv())
                continue
            frame = socket.recv(copy=False)
            large = len(frame) >= _COPIED_IN
            frames.append(frame.buffer.toreadonly() if large else frame.bytes)
        return frames

    def handle(self, frames: list[Frame]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.loop is not None and not self.loop.is_closed():
            self.loop.remove_reader(self.socket.fileno())
        _end(self.socket, 0)


_pumps: Final[WeakSet[_Pump]] = WeakSet()


def _leave_alone() -> None:
    """Disable all pumps in a forked process, whose event loop is also a copy.

    The sockets belong to the parent. In the child, every ZeroMQ operation fails with "interrupted".
    """
    for pump in _pumps:
        pump.closed = True


os.register_at_fork(after_in_child=_leave_alone)


class _Gate(_Pump):
    """Answers ZeroMQ whether a CURVE key is known.

    ZeroMQ asks during a handshake, over a socket of the router's own context (ZAP,
    https://rfc.zeromq.org/spec/27).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: frozenset[str]) -> None:
        super().__init__(context.socket(zmq.REP))
        self.socket.bind("inproc://zeromq.zap.01")
        self._known = {z85.decode(key) for key in known}
        self.refused = Dropped(logger)

    def handle(self, frames: list[Any]) -> None:
        version, request, domain, address, _, mechanism, *credentials = frames
        known = (
            domain == _DOMAIN and mechanism == b"CURVE" and not self._known.isdisjoint(credentials)
        )
        if not known:
            self.refused("%s has a key that is not in the driver's folder", address.decode())
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, b"", b""])
        self.after_send()


class _Connections(_Pump):
    """Reports when a connection of the router ends. ZeroMQ does not report the peer.

    Over tcp it also closes connections that have not finished their handshake, the oldest first,
    when they take more than a quarter of the files that this process may open. ZeroMQ itself would
    accept connections until no file descriptor is left.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], *, keys: bool
    ) -> None:
        super().__init__(context.socket(zmq.PAIR))
        # With a limit, ZeroMQ's thread, and with it all connections, would wait for this end.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        router.monitor("inproc://connections", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.socket.connect("inproc://connections")
        self.on_break: OnBreak | None = None
        self.port = 0
        """Port that the router listens on; 0: not over tcp."""
        self.cut_off = Dropped(logger)
        self._handshake_bytes = _CURVE_HANDSHAKE_BYTES if keys else _PLAIN_HANDSHAKE_BYTES
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = sys.maxsize if files == resource.RLIM_INFINITY else files // 4
        self._accepted: dict[int, None] = {}
        """Descriptors of connections, oldest first, except connections that are known to have
        finished their handshake."""

    def handle(self, frames: list[Any]) -> None:
        event, fd = _EVENT.unpack(frames[0])
        self._accepted.pop(fd, None)
        if event == zmq.EVENT_DISCONNECTED:
            if self.on_break is not None:
                self.on_break()
        elif self.port:
            self._accepted[fd] = None
            while len(self._accepted) > self._most:
                oldest = next(iter(self._accepted))
                del self._accepted[oldest]
                self._cut_off(oldest)

    def _cut_off(self, fd: int) -> None:
        """Shut down a connection that has not finished its handshake. ZeroMQ then closes it."""
        try:
            connection = sockets.socket(fileno=fd)
        except OSError:
            # The connection was closed meanwhile; ZeroMQ reports that next.
            return
        try:
            # The descriptor may belong to another file by now.
            if connection.getsockname()[1] != self.port:
                return
            info = connection.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _RECEIVED.size)
            (received,) = _RECEIVED.unpack(info)
            if received < self._handshake_bytes:
                connection.shutdown(sockets.SHUT_RDWR)
                self.cut_off("too many connections have not finished their handshake")
        except (OSError, IndexError, struct.error):
            return
        finally:
            # ZeroMQ owns the descriptor.
            connection.detach()


class ZmqRouter(_Pump):
    """The driver's end (``DriverTransport``).

    With ``keys``, the router admits peers that have the key of a client in ``keys``, or
    ``worker_keys``.

    Attributes:
        address: for connections of workers on this machine.
        outer_address: for connections from other machines.
        worker_keys: keys that are created for this router only. None without ``keys``.
    """

    plain_frames = 2

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int,
        keys: DriverKeys | None = None,
        insecure: bool = False,
        heartbeat_timeout: float | None = None,
    ) -> None:
        check_address(address, keys=keys is not None, insecure=insecure)
        self._gate: _Gate | None = None
        self._connections: _Connections | None = None
        self.worker_keys: ClientKeys | None = None
        # A context has a single handler that decides which peers to admit. In the shared context,
        # this handler may belong to other code.
        check_threads(_THREADS)
        self._context = zmq.Context()
        super().__init__(_socket(self._context, zmq.ROUTER, address, max_message_bytes))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, MOST_UNREAD)
        self.socket.setsockopt(zmq.RCVHWM, _MOST_UNTAKEN)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        _set_heartbeat(self.socket, address, heartbeat_timeout)
        # With a domain, libzmq refuses ZMTP 1 and 2. With these versions, any connection that sends
        # a few bytes becomes a peer; if this happens while the socket closes, this process ends
        # (zmtp_engine.cpp 4.3.5, process_routing_id_msg).
        self.socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if keys is not None:
            self._lock(keys)
        elif address.startswith("tcp://") and not _is_loopback(address):
            logger.warning(
                "%s accepts any peer and does not encrypt messages (insecure=True)",
                address,
            )
        self._connections = _Connections(self._context, self.socket, keys=keys is not None)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            hint = (
                "the path of a socket has at most 107 bytes, and its folder must be there, with "
                "room for one more file (TMPDIR names the folder of address='ipc')"
                if address.startswith("ipc://")
                else "name an IP address or an interface of this machine, and a free port or *"
            )
            raise UsageError(
                f"sglrl cannot listen on {address}: {zmq.strerror(error.errno or 0)}; {hint}"
            ) from None
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if bound.startswith("tcp://"):
            self._connections.port = int(bound.rpartition(":")[2])
        self.address = _reachable(bound, here=True)
        self.outer_address = _reachable(bound, here=False)
        self._on_message: OnDriverMessage | None = None
        _end_unclosed(self, *self._sockets, self._context)

    def _lock(self, keys: DriverKeys) -> None:
        """Set up the keys. Call this before any peer can connect."""
        public, secret = key_pair()
        self.worker_keys = ClientKeys(driver=public_key(keys.secret), public=public, secret=secret)
        self._gate = _Gate(self._context, keys.clients | {public})
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        # Without this, ZeroMQ admits every peer if no handler answers its question.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    @property
    def _sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets in closing order.

        The router is closed first: ZeroMQ's thread would wait until its last event is read.
        """
        pumps = (self, self._connections, self._gate)
        return [pump.socket for pump in pumps if pump is not None]

    @property
    def refused(self) -> int:
        """Number of handshakes with an unknown key. A refused peer retries repeatedly."""
        return 0 if self._gate is None else self._gate.refused.count

    @property
    def cut_off(self) -> int:
        """Number of connections closed because too many had not finished their handshake."""
        return 0 if self._connections is None else self._connections.cut_off.count

    def start(
        self,
        on_message: OnDriverMessage,
        on_pause: OnPause | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        self._on_message = on_message
        self.on_pause = on_pause
        if self._gate is not None:
            self._gate.begin()
        if self._connections is not None:
            self._connections.on_break = on_break
            self._connections.begin()
        self.begin()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        # Close in the order of ``_sockets``.
        for pump in (self._connections, self._gate):
            if pump is not None:
                pump.close()
        self._context.destroy(0)

    def handle(self, frames: list[Any]) -> None:
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
        keys: ClientKeys | None = None,
        on_break: Callable[[], None] | None = None,
        heartbeat_timeout: float | None = None,
    ) -> None:
        super().__init__(
            _dealer(address, identity, max_message_bytes, keys, on_break, heartbeat_timeout)
        )
        _end_unclosed(self, self.socket)
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
            _send(self.socket, frames)
        except zmq.Again:
            # The queue has no limit, so this error means that the connection was refused for good.
            raise Closed("the driver has refused the connection") from None
        self.after_send()


class ZmqPolledDealer:
    """A worker's end without an event loop, polled by a thread with other work.

    The engine's scheduler loop uses it. Only the thread that created it may use it, except for
    ``wake``.
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
    ) -> None:
        self._socket = _dealer(
            address, identity, max_message_bytes, keys, on_break, heartbeat_timeout
        )
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakeup, zmq.POLLIN)

    def wake(self) -> None:
        """End the current ``wait``, or the next one. Other threads may call this method only."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeup, 1)

    def receive(self) -> list[bytes] | None:
        """Return the next message, or None if none has arrived. Never wait."""
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
        _send(self._socket, frames)

    def close(self, linger: float = 0.0) -> None:
        """Close the socket.

        Args:
            linger: seconds to send the messages that are not sent yet.
        """
        _end(self._socket, linger)
        os.close(self._wakeup)
