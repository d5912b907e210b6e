"""The client of an ``AsyncSGLang``: how it is connected, started and closed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from ...api.blocking import BlockingClient, blocking
from ...errors import Closed, DeadlineExceeded, UsageError

CONNECTION: Final = ("keys", "insecure", "heartbeat_timeout")
"""Names in ``server_kwargs`` that a copy of the service in another process also needs."""
_CONNECT_SECONDS: Final = 10.0
_RENAMED: Final = {"max_model_len": "context_length", "num_replicas": "replicas"}
"""Names of TorchRL and vLLM, and the corresponding arguments of ``sglrl.launch``."""
_START_SECONDS: Final = 600.0


def connect(url: str, timeout: float, server_kwargs: Mapping[str, Any]) -> BlockingClient:
    """Return a running client of the pool at ``url``.

    Raises:
        ConnectionError: no pool answers.
    """
    known = {name: server_kwargs[name] for name in CONNECTION if name in server_kwargs}
    try:
        client = blocking.connect(
            url, connect_timeout=min(_CONNECT_SECONDS, timeout), timeout=timeout, **known
        )
        client.__enter__()
    except (DeadlineExceeded, Closed, UsageError) as error:
        raise ConnectionError(
            f"Cannot connect to SGLang server at {without_secret(url)}. "
            f"Ensure the server is running and accessible. ({error})"
        ) from error
    return client


def launch_arguments(
    replicas: int, timeout: float, server_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``server_kwargs`` as arguments of ``sglrl.launch``, with the service's defaults."""
    arguments = {_RENAMED.get(k, k): v for k, v in server_kwargs.items()}
    arguments.setdefault("replicas", replicas)
    arguments.setdefault("start_timeout", max(timeout, _START_SECONDS))
    gpus = arguments.pop("cuda_devices", None)
    if gpus:
        arguments["gpus"] = list(gpus)
    host, port = arguments.pop("host", None), arguments.pop("port", None)
    if host is not None or port is not None:
        arguments["address"] = f"tcp://{host or '127.0.0.1'}:{port or '*'}"
    return arguments


def close(client: BlockingClient) -> None:
    """Close a client on any thread."""
    if threading.current_thread() is client._thread:
        # The garbage collector may run on the client's thread, which cannot wait for itself.
        threading.Thread(target=client.close).start()
    else:
        client.close()


def without_secret(url: str | None) -> str | None:
    """Return the address without the secret."""
    return None if url is None else url.partition("#")[0]
