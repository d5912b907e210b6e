"""Check and convert the addresses of sockets: ``ipc://PATH`` and ``tcp://HOST:PORT``."""

from __future__ import annotations

import contextlib
import socket as sockets
from ipaddress import ip_address

from ..config import flag
from ..errors import UsageError

_ALL_INTERFACES = ("0.0.0.0", "::")


def check_address(address: str, *, keys: bool = False, insecure: bool = False) -> None:
    """Raise ``UsageError`` unless sglrl may listen on an address, or connect to it.

    Args:
        address: the address to check.
        keys: whether keys are given.
        insecure: whether an address that other machines can reach is allowed without keys.
    """
    flag("insecure", insecure)
    if not isinstance(address, str):
        raise UsageError(f"address must be a text such as tcp://127.0.0.1:*, got {address!r:.80}")
    if address == "ipc" or address.startswith("ipc://"):
        if keys:
            raise UsageError("keys= is for tcp; an ipc socket is in a folder of your own already")
        return
    if address == "tcp" or address.startswith("tcp://"):
        if keys or insecure or address == "tcp" or is_loopback(address):
            return
        raise UsageError(
            f"{address} is not a loopback address; connections beyond this machine need keys: "
            "make them with 'sglrl keys DIR' and pass keys='DIR' (insecure=True accepts any peer, "
            "unencrypted)"
        )
    raise UsageError(f"unknown address {address!r}; use ipc://PATH or tcp://127.0.0.1:*")


def check_tcp(address: str, what: str, *, listens: bool = False) -> None:
    """Raise ``UsageError`` unless an address is ``tcp://HOST:PORT`` with a possible host and port.

    Args:
        address: the address to check.
        what: the owner of the address, for the error.
        listens: whether a process will listen on it, so that the host may be 0.0.0.0.
    """
    port = address.rpartition(":")[2]
    if not address.startswith("tcp://") or not host_of(address) or not port.isdigit():
        raise UsageError(f"the address of {what} is tcp://HOST:PORT, got {address!r}")
    if not 0 < int(port) < 1 << 16:
        raise UsageError(f"the address of {what} has a port from 1 to 65535, got {address!r}")
    if not listens and host_of(address) in _ALL_INTERFACES:
        raise UsageError(
            f"{address} stands for all interfaces of one machine; name the address or the host "
            f"name at which this machine reaches {what}"
        )


def host_of(address: str) -> str:
    """Return the host of ``tcp://HOST:PORT``."""
    return address.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")


def ip_of(address: str) -> str:
    """Return the IPv4 address of ``tcp://HOST:PORT``, or "" if it has none. Send no packet."""
    with contextlib.suppress(OSError), sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as s:
        s.connect((host_of(address), int(address.rpartition(":")[2])))
        ip: str = s.getpeername()[0]
        return ip
    return ""


def is_own(ip: str) -> bool:
    """Return True if an IP address belongs to this machine, so that a socket can listen on it."""
    try:
        sockets.create_server((ip, 0)).close()
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return True if a TCP address can be reached only from this machine."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        # This is a host name or an interface, which may have any address.
        return False


def address_towards(other: str, own: str) -> str:
    """Return the address of this machine's socket at ``own`` for a peer at the address ``other``.

    If ``own`` stands for all interfaces, the host of the result is the IP address from which this
    machine sends packets to ``other``.
    """
    host = host_of(own)
    if host not in _ALL_INTERFACES:
        return own
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    # This sends no packet, as in ``reachable``.
    with contextlib.suppress(OSError), sockets.socket(family, sockets.SOCK_DGRAM) as s:
        s.connect((host_of(other), int(other.rpartition(":")[2])))
        ip = s.getsockname()[0]
        return f"tcp://{f'[{ip}]' if ':' in ip else ip}:{own.rpartition(':')[2]}"
    return own


def reachable(address: str, *, here: bool) -> str:
    """Return the address at which to connect to an end that listens on ``address``.

    Args:
        address: the address of the listening end.
        here: whether the connections come from this machine. If they come from other machines and
            the end listens on all interfaces, the result is a guess.
    """
    for anywhere, loopback, family, away in (
        ("tcp://0.0.0.0:", "127.0.0.1", sockets.AF_INET, "192.0.2.1"),
        ("tcp://[::]:", "[::1]", sockets.AF_INET6, "2001:db8::1"),
    ):
        if address.startswith(anywhere):
            host = loopback
            if not here:
                # This sends no packet. The kernel only chooses a source address for packets.
                with contextlib.suppress(OSError), sockets.socket(family, sockets.SOCK_DGRAM) as s:
                    s.connect((away, 9))
                    ip = s.getsockname()[0]
                    host = f"[{ip}]" if ":" in ip else ip
            return f"tcp://{host}:{address.removeprefix(anywhere)}"
    return address
