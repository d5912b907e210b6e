"""The address that a gateway listens at."""

from __future__ import annotations

import socket

from ..errors import UsageError


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address, and does not listen.

    Several processes may bind the same port. While a socket of this user has it, no other user's
    program gets it.

    Raises:
        UsageError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}: {error.strerror}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise UsageError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return made
