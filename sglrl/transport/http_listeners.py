"""Bind the sockets of HTTP servers."""

from __future__ import annotations

import socket

from ..errors import UsageError


def reserved(host: str, port: int) -> socket.socket:
    """Return a socket that reserves an address, so that ``bound`` can use it. It does not listen.

    Raises:
        UsageError: the address cannot be used, or a program listens there.
    """
    # Without SO_REUSEPORT, this fails if another gateway listens at the address.
    with _bound(host, port, socket.SO_REUSEADDR) as probe:
        port = probe.getsockname()[1]
    return bound(host, port)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address, and does not listen.

    Several processes of one user may bind the same port. Other users cannot bind it meanwhile.

    Raises:
        UsageError: the address cannot be used.
    """
    return _bound(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def _bound(host: str, port: int, *options: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}: {error.strerror}") from None
    try:
        for option in options:
            made.setsockopt(socket.SOL_SOCKET, option, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise UsageError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return made
