"""Reject connections to other machines, and remember who tried."""

from __future__ import annotations

import sys
from ipaddress import ip_address
from typing import Any

attempts: list[str] = []
"""What was rejected. A library may have swallowed the error."""


def watch() -> None:
    """Reject all connections of this process to other machines, until it ends."""
    sys.addaudithook(_check)


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if not _local(host):
        attempts.append(f"{event} {host}")
        raise ConnectionRefusedError(f"a test must not use the network: {event} {host}")


def _local(host: Any) -> bool:
    name = host.decode() if isinstance(host, bytes) else str(host or "localhost")
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback or ip_address(name).is_unspecified
    except ValueError:
        return False
