"""The settings of a gateway: its address, names, keys and limits."""

from __future__ import annotations

import os
import re

import msgspec

from ..config import GatewayOptions
from ..errors import UsageError
from ..transport.addresses import is_loopback


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a gateway. The constructor checks them. ``serve`` describes most of them.

    Attributes:
        body_seconds: time limit for the body of a request, and for its head.
        max_connections: maximum number of open connections.
        weights_host: an address of this machine that workers use to receive weights. None: the
            workers are on this machine.
        options: the treatment of parts of requests that the model cannot be shown.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    keep_disconnected: bool = True
    expire_after: float = 3600.0
    max_sessions: int = 100_000
    max_body_bytes: int = 16 << 20
    body_seconds: float = 30.0
    max_connections: int = 10_000
    weight_device: str = "cuda:0"
    weights_host: str | None = None
    options: GatewayOptions = GatewayOptions()

    def url(self, port: int) -> str:
        """Return the URL of a gateway with these settings that listens at a port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls_cert else 'http'}://{host}:{port}"

    def __post_init__(self) -> None:
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise UsageError(f"name must be a text, or several, got {self.names!r:.200}")
        if type(self.port) is not int or not 0 <= self.port <= 65_535:
            raise UsageError(f"port must be in 0..65535, got {self.port!r:.200}")
        for name in ("expire_after", "max_sessions", "max_body_bytes", "body_seconds"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be more than 0, got {getattr(self, name)!r}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise UsageError("tls_cert and tls_key belong together: give both, or neither")
        if not re.fullmatch(r"cuda:\d+", self.weight_device):
            raise UsageError(f"weight_device must be 'cuda:N', got {self.weight_device!r}")
        for name in ("tls_cert", "tls_key"):
            file = getattr(self, name)
            if file and not os.access(file, os.R_OK):
                raise UsageError(f"{name}={file!r} cannot be read")
        if not self.api_key and not is_loopback(f"tcp://{self.host}:0"):
            raise UsageError(
                f"host={self.host!r} can be reached from other machines, so the gateway needs a "
                "key: api_key= (--api-key)"
            )


class ProcessPlace(msgspec.Struct, frozen=True):
    """The place of a process among the processes of its gateway.

    Attributes:
        index: the number of the process.
        sockets: the paths of the Unix sockets of all processes. () if there is only one process.
    """

    index: int = 0
    sockets: tuple[str, ...] = ()


def names_of(model: str) -> tuple[str, ...]:
    """Return the names of a model for clients: its name on the hub, or the name of its folder."""
    return (os.path.basename(model) if os.path.isabs(model) else model,)
