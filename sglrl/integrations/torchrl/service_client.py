"""Connect, start and close the client of an ``AsyncSGLang``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from ...errors import Closed, DeadlineExceeded, UsageError
from ...launching.blocking import BlockingClient, blocking

CONNECTION: Final = ("keys", "insecure", "heartbeat_timeout")
"""The names in ``server_kwargs`` that a copy of the service in another process also needs."""
_CONNECT_SECONDS: Final = 10.0
_RENAMED: Final = {
    "enforce_eager": "disable_cuda_graph",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "num_devices": "tp_size",
    "num_replicas": "replicas",
    "tensor_parallel_size": "tp_size",
}
"""The arguments of ``sglrl.launch`` for names of TorchRL's ``AsyncVLLM`` and of vLLM. For other
names of vLLM, ``launch`` raises an error that suggests the closest name of SGLang."""
_START_SECONDS: Final = 600.0


def connect(url: str, timeout: float, server_kwargs: Mapping[str, Any]) -> BlockingClient:
    """Return a running client of the pool at ``url``.

    Raises:
        ConnectionError: no pool answers.
        UsageError: an argument applies only to the start of a pool.
    """
    if others := server_kwargs.keys() - set(CONNECTION):
        raise UsageError(
            f"{', '.join(sorted(others))}: a running pool keeps its settings; beside its address, "
            f"give only {', '.join(CONNECTION)}"
        )
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
    tp_size: int, replicas: int, timeout: float, server_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``server_kwargs`` as arguments of ``sglrl.launch``, with the service's defaults.

    Raises:
        UsageError: two names of one argument were given.
    """
    arguments: dict[str, Any] = {
        "timeout": timeout,
        "start_timeout": max(timeout, _START_SECONDS),
    }
    names = {}
    if tp_size != 1:
        arguments["tp_size"], names["tp_size"] = tp_size, "tp_size"
    if replicas != 1:
        arguments["replicas"], names["replicas"] = replicas, "dp_size"
    for given, value in server_kwargs.items():
        name = _RENAMED.get(given, given)
        if name in names:
            raise UsageError(f"{names[name]} and {given} are the same: give one of them")
        arguments[name], names[name] = value, given
    gpus = arguments.pop("cuda_devices", None)
    if gpus:
        arguments["gpus"] = list(gpus)
    host, port = arguments.pop("host", None), arguments.pop("port", None)
    if host is not None or port is not None:
        arguments["address"] = f"tcp://{host or '127.0.0.1'}:{port or '*'}"
    return arguments


def close(client: BlockingClient) -> None:
    """Close a client on any thread."""
    if threading.current_thread() is client.thread:
        # The garbage collector may run on the client's thread, which cannot wait for itself.
        threading.Thread(target=client.close).start()
    else:
        client.close()


def without_secret(url: str | None) -> str | None:
    """Return the address without the secret."""
    return None if url is None else url.partition("#")[0]
