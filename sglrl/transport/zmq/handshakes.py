"""Check the keys of peers during the handshake, and limit the number of unfinished handshakes."""

from __future__ import annotations

import logging
import resource
import socket as sockets
import struct
import sys
from typing import Any, Final

import zmq
from zmq.utils import z85

from ..base import OnBreak
from ..dropped import Dropped
from .pump import Pump
from .sockets import Context, Socket

logger = logging.getLogger("sglrl.transport")

DOMAIN: Final = b"sglrl"
"""The domain of routers in ZeroMQ's authentication protocol (ZAP)."""
_GREETING_BYTES: Final = 64
_PLAIN_HANDSHAKE_BYTES: Final = _GREETING_BYTES + 27
"""Bytes of a greeting and the shortest READY command (https://rfc.zeromq.org/spec/23). A connection
on which fewer bytes have arrived has not finished its handshake."""
_CURVE_HANDSHAKE_BYTES: Final = _GREETING_BYTES + 202 + 257
"""The same for CURVE: bytes of a greeting, HELLO and the shortest INITIATE
(https://rfc.zeromq.org/spec/26)."""
_EVENT: Final = struct.Struct("=HI")
_RECEIVED: Final = struct.Struct("=128xQ")
"""Extracts ``tcpi_bytes_received`` from ``struct tcp_info`` of linux/tcp.h."""


class Authenticator(Pump):
    """Decides whether ZeroMQ accepts the CURVE key of a peer.

    During a handshake, ZeroMQ sends the key over a socket of the router's own context (ZAP,
    https://rfc.zeromq.org/spec/27).

    Args:
        context: the context of the router.
        known: the public keys to accept, in Z85.
    """

    def __init__(self, context: Context, known: frozenset[str]) -> None:
        super().__init__(context.socket(zmq.REP))
        self.socket.bind("inproc://zeromq.zap.01")
        self.refused = Dropped(logger)
        self._known = {z85.decode(key) for key in known}

    def handle(self, frames: list[Any]) -> None:
        version, request, domain, address, _, mechanism, *credentials = frames
        known = (
            domain == DOMAIN and mechanism == b"CURVE" and not self._known.isdisjoint(credentials)
        )
        if not known:
            self.refused("%s has a key that is not in the driver's folder", address.decode())
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        self.socket.send_multipart([version, request, *status, b"", b""])
        self.check_soon()


class ConnectionMonitor(Pump):
    """Reports that a connection of the router has ended. ZeroMQ does not report which one.

    Over tcp it also limits connections with an unfinished handshake to a quarter of the files that
    this process may open. It closes the oldest ones first. ZeroMQ itself would accept connections
    until no file descriptor is left.

    Args:
        context: the context of the router.
        router: the socket of the router.
        keys: whether the handshakes use CURVE.

    Attributes:
        port: the port on which the router listens, or 0 if it does not use tcp.
    """

    def __init__(self, context: Context, router: Socket, *, keys: bool) -> None:
        super().__init__(context.socket(zmq.PAIR))
        # With a limit, ZeroMQ's thread would wait for this socket, and so would all connections.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        router.monitor("inproc://connections", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.socket.connect("inproc://connections")
        self.on_break: OnBreak | None = None
        self.port = 0
        self.cut_off = Dropped(logger)
        self._handshake_bytes = _CURVE_HANDSHAKE_BYTES if keys else _PLAIN_HANDSHAKE_BYTES
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = sys.maxsize if files == resource.RLIM_INFINITY else files // 4
        self._accepted: dict[int, None] = {}
        """Descriptors of open connections, oldest first, except connections that ``_cut_off`` has
        checked."""

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
            # The connection was closed in the meantime. ZeroMQ reports this next.
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
            # Do not close the descriptor, because ZeroMQ owns it.
            connection.detach()
