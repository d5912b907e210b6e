"""The driver's socket: a ROUTER with its own context."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import zmq

from ...errors import Closed, UsageError
from ...wire.processes import ClientKeys
from ..addresses import check_address, is_loopback, reachable
from ..base import MAX_UNREAD, DriverKeys, Frame, OnBreak, OnDriverMessage, OnPause
from .handshakes import DOMAIN, Authenticator, ConnectionMonitor
from .pump import Pump, close_with
from .sockets import key_pair, open_socket, public_key, send_frames

logger = logging.getLogger("sglrl.transport")

_MAX_UNTAKEN: Final = 1 << 14
"""Maximum number of messages of one peer that wait at the driver. Further messages wait at the
peer, and are lost if the peer exits. While they wait there, ZeroMQ does not read heartbeats either,
and the connection would soon count as broken. A driver that is busy for ``heartbeat_timeout`` does
not reach this limit."""
_HANDSHAKE_MS: Final = 10_000
"""Maximum milliseconds of a handshake. With keys, it includes a check by the driver, which may be
busy."""


class ZmqRouter(Pump):
    """The driver's end (``DriverTransport``).

    With ``keys``, the router admits peers that have ``worker_keys`` or the key of a client in
    ``keys``.

    Args:
        address: the address to listen on.
        max_message_bytes: a connection on which a larger message arrives is closed.
        keys: the keys of the driver and its clients. None: connections are not encrypted.
        insecure: whether other machines may connect without keys.
        heartbeat_timeout: close a TCP connection on which nothing arrives for this number of
            seconds. None: never.
        handover: whether a new connection replaces an older one with the same identity. The router
            may not have noticed yet that the older one is broken. If False, messages of the new
            connection are ignored.

    Attributes:
        address: the address for workers on this machine.
        outer_address: the address for other machines.
        worker_keys: a key pair that this router creates for its workers. None without ``keys``.
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
        handover: bool = False,
    ) -> None:
        check_address(address, keys=keys is not None, insecure=insecure)
        # A context has a single handler that decides which peers to admit. In the shared context,
        # this handler may belong to other code.
        self._context = zmq.Context()
        super().__init__(
            open_socket(
                self._context,
                zmq.ROUTER,
                address,
                max_message_bytes=max_message_bytes,
                heartbeat_timeout=heartbeat_timeout,
            )
        )
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, handover)
        self.socket.setsockopt(zmq.SNDHWM, MAX_UNREAD)
        self.socket.setsockopt(zmq.RCVHWM, _MAX_UNTAKEN)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        # With a domain, libzmq refuses ZMTP 1 and 2. With these versions, any connection that sends
        # a few bytes becomes a peer. If this happens while the socket closes, libzmq aborts this
        # process (zmtp_engine.cpp 4.3.5, process_routing_id_msg).
        self.socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        self.worker_keys: ClientKeys | None = None
        self._authenticator: Authenticator | None = None
        if keys is not None:
            self._require(keys)
        elif address.startswith("tcp://") and not is_loopback(address):
            logger.warning(
                "%s accepts any peer and does not encrypt messages (insecure=True)",
                address,
            )
        self._monitor = ConnectionMonitor(self._context, self.socket, keys=keys is not None)
        self._bind(address)
        bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if bound.startswith("tcp://"):
            self._monitor.port = int(bound.rpartition(":")[2])
        self.address = reachable(bound, here=True)
        self.outer_address = reachable(bound, here=False)
        self._on_message: OnDriverMessage | None = None
        close_with(self, self.socket, *(helper.socket for helper in self._helpers), self._context)

    def _require(self, keys: DriverKeys) -> None:
        """Admit only peers with known keys. Call this before any peer can connect."""
        public, secret = key_pair()
        self.worker_keys = ClientKeys(driver=public_key(keys.secret), public=public, secret=secret)
        self._authenticator = Authenticator(self._context, keys.clients | {public})
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        # Without this option, ZeroMQ admits every peer if no handler checks the keys.
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _bind(self, address: str) -> None:
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

    @property
    def _helpers(self) -> list[Pump]:
        """The other pumps, in the order in which they are closed.

        They are closed after the router. Otherwise ZeroMQ's thread would wait until the router's
        last event is read.
        """
        helpers = (self._monitor, self._authenticator)
        return [helper for helper in helpers if helper is not None]

    @property
    def refused(self) -> int:
        """Number of handshakes with an unknown key. A refused peer may try many times."""
        return 0 if self._authenticator is None else self._authenticator.refused.count

    @property
    def cut_off(self) -> int:
        """Number of connections closed because too many had not finished their handshake."""
        return self._monitor.cut_off.count

    def start(
        self,
        on_message: OnDriverMessage,
        on_pause: OnPause | None = None,
        on_break: OnBreak | None = None,
    ) -> None:
        self._on_message = on_message
        self.on_pause = on_pause
        self._monitor.on_break = on_break
        for helper in self._helpers:
            helper.begin()
        self.begin()

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        for helper in self._helpers:
            helper.close()
        self._context.destroy(0)

    def handle(self, frames: list[Any]) -> None:
        assert self._on_message is not None
        self._on_message(frames[0], frames[1:])

    def send(self, peer: bytes, frames: Sequence[Frame]) -> bool:
        if self.closed:
            raise Closed("the transport is closed")
        try:
            send_frames(self.socket, [peer, *frames])
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        self.check_soon()
        return True
