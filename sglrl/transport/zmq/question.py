"""Send one message and return the answer, or explain why there is none."""

from __future__ import annotations

import secrets
import socket as sockets
import time
from math import ceil
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...errors import Closed
from ...wire.processes import ClientKeys
from ..addresses import host_of
from .dealers import DealerSettings, new_dealer
from .sockets import close_socket

_BYTES: Final = 1 << 20
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def check_port(address: str, seconds: float) -> None:
    """Raise ``Closed`` with the reason unless a TCP connection to ``address`` can be made."""
    host, port = host_of(address), int(address.rpartition(":")[2])
    try:
        sockets.create_connection((host, port), seconds).close()
    except TimeoutError:
        raise Closed(
            f"{address} does not answer within {seconds:g} s: the host is down, or a firewall "
            "drops packets to this port"
        ) from None
    except ConnectionRefusedError:
        raise Closed(f"nothing listens at {address}: start it there first") from None
    except OSError as error:
        raise Closed(f"{address} cannot be reached: {error.strerror or error}") from None


def ask(address: str, keys: ClientKeys | None, message: bytes, seconds: float) -> bytes:
    """Connect, send a message and return the answer.

    Raises:
        Closed: the handshake failed, or there was no answer in time. The message has the reason.
    """
    deadline = time.monotonic() + seconds
    identity = f"question/{secrets.token_hex(8)}".encode()
    dealer = new_dealer(DealerSettings(address, identity, _BYTES, keys, None))
    monitor = dealer.get_monitor_socket(_EVENTS)
    try:
        dealer.connect(address)
        if not monitor.poll(ceil(seconds * 1000)):
            raise Closed(f"{address} says nothing that ZeroMQ understands: is it another program?")
        event = parse_monitor_message(monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise Closed(
                "the key is refused: copy the .public file of this key into the program's folder "
                "and start the program again"
            )
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise Closed(
                "the handshake fails: driver.public here is not the key of that program, or only "
                "one side uses keys"
            )
        dealer.send(message)
        if not dealer.poll(ceil(max(0.0, deadline - time.monotonic()) * 1000)):
            raise Closed(f"no answer within {seconds:g} s: the program is busy or stopped")
        return dealer.recv_multipart()[0]
    finally:
        close_socket(dealer)
        monitor.close(0)
