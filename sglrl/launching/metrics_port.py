"""The argument ``metrics_port`` of ``launch``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from ..client.client import Client
from ..config import install
from ..control.client_base import Closable
from ..errors import UsageError


def metrics_server(given: Any) -> Callable[[Client], Closable] | None:
    """Return a function that serves the metrics of a client's pool, or None without a port.

    Raises:
        UsageError: the value is neither a port nor "HOST:PORT", or prometheus-client is missing.
    """
    if given is None:
        return None
    host, port = "127.0.0.1", given
    if isinstance(given, str):
        host, _, port = given.rpartition(":")
        port = int(port) if port.isdecimal() else port
    if not host or type(port) is not int or not 1 <= port <= 65_535:
        raise UsageError(f"metrics_port must be a port or 'HOST:PORT', got {given!r:.200}")
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(f"metrics_port needs prometheus_client: {install('metrics')}")

    def serve(client: Client) -> Closable:
        from ..control.prometheus import MetricsServer

        return MetricsServer(client, host, port)

    return serve
