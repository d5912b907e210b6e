"""``connect``: a client for a pool that another process has launched.

The client uses the ordinary ``Client`` and ``Driver`` classes. Its driver treats the other process
as one worker that accepts any number of calls. In the other process, ``remote/server.py`` receives
these calls, and the driver there routes them to the real workers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ..client.client import Client
from ..config import HEARTBEAT_TIMEOUT, check_heartbeat, check_timeout
from ..control.operations import Operation
from ..errors import UnknownAdapter, UsageError
from ..transport.curve_keys import read_client_keys
from ..weights.deadline import Deadline, turn
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateRequest
from ..wire.adapters import LoraInfo
from ..wire.processes import PoolEntry
from .pool import CONNECT_SECONDS, RemotePool


class RemoteAdapters:
    """The LoRA adapters of the other process's pool. That process checks their names in calls."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool

    @property
    def loaded(self) -> Mapping[str, LoraInfo]:
        raise UsageError(
            "loras is listed by the process that launched the pool; await list_loras()"
        )

    @property
    def versions(self) -> Mapping[str, int]:
        return self._pool.weights.lora_versions

    def check(self, name: Any) -> str:
        if not isinstance(name, str) or not name:
            raise UnknownAdapter(f"lora must be the name of an adapter, got {name!r}")
        return name

    def route_version(self, name: str, version: int) -> int:
        return version


class RemoteControl:
    """Runs operations in the process that launched the pool. They affect all of its clients."""

    is_local: Final = False

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool
        self.adapters = RemoteAdapters(pool)
        self.sender = _RemoteSender(pool)

    async def start(self) -> None: ...

    async def run(
        self, operation: Operation, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments = operation.bind(args, kwargs)
        limit = operation.limit(arguments, client.timeout)
        return await self._pool.ask(operation, arguments, limit)

    def part(self, kind: type[Any]) -> NoReturn:
        raise AssertionError("operations run in the process that launched the pool")


class _RemoteSender:
    """Sends weights from this process to the pool's workers.

    The first update creates a ``Sender`` with the given device and host. Later updates use the same
    ``Sender``, unless it has lost its connection.
    """

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool
        self._sender: Any = None
        self._connecting = asyncio.Lock()

    async def connect(self, device: Any, host: str | None, timeout: float) -> float:
        raise UsageError(
            "the group for weight updates is formed ahead of the first one by the process that "
            "launched the pool"
        )

    async def update(
        self,
        weights: Any,
        request: UpdateRequest,
        *,
        device: Any = None,
        host: str | None = None,
    ) -> UpdateReport:
        request.check_values()
        engine = self._pool.engine
        if device is None and engine is not None and engine.device == "cpu":
            device = "cpu"
        if self._sender is None or self._sender.lost:
            from ..weights.remote_sender import Sender

            deadline = Deadline(request.timeout, request.begun)
            async with turn(self._connecting, deadline, wait=request.wait):
                if self._sender is not None and self._sender.lost:
                    await self._sender.close()
                    self._sender = None
                if self._sender is None:
                    self._sender = await Sender.connect(
                        self._pool.weights.address,
                        device=device,
                        host="127.0.0.1" if host is None else host,
                        timeout=deadline.left,
                        keys=self._pool.entry.keys,
                        insecure=self._pool.entry.insecure,
                        heartbeat_timeout=self._pool.entry.heartbeat_timeout,
                    )
        report: UpdateReport = await self._sender.update_as(weights, request)
        self._pool.weights.set_version(report.version)
        return report

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()


class _PoolAddress:
    """The address of the pool that this client is connected to, as a ``RemoteServer``."""

    def __init__(self, entry: PoolEntry) -> None:
        self.address = entry.address
        self.entry = entry

    async def close(self) -> None: ...


def connect(
    address: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    timeout: float | None = None,
    connect_timeout: float = CONNECT_SECONDS,
    model: str | os.PathLike[str] | None = None,
    max_message_bytes: int = 256 << 20,
    heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT,
) -> Client:
    """Return a client for another process's pool: ``async with sglrl.connect(address) as client``.

    The client has the methods of the ``Client`` in that process, except that it cannot replace
    LoRA adapters. The pool routes this client's calls together with all other calls. In
    ``update_weights`` this process sends the weights. All updates use the ``device`` and ``host``
    of the first update.
    Exiting the block does not change the pool.

    Args:
        address: ``client.address`` in the process that called ``launch``. It contains a secret.
        keys: a folder with ``driver.public`` and the secret key of one client, or the file of a
            client's secret key. ``sglrl keys`` creates them for ``launch(keys=...)``.
        insecure: allow a connection to another machine without keys.
        timeout: the default time limit of every call, in seconds. None: no limit.
        connect_timeout: seconds to wait for the first answer of the pool.
        model: the path of the tokenizer in this process. None: the path in the other process.
        max_message_bytes: the size of the largest message that this client accepts.
        heartbeat_timeout: seconds without a message after which a tcp connection counts as broken;
            see ``launch``. All calls then raise ``Closed``, and you have to connect again. None: no
            heartbeats.

    Raises:
        UsageError: the address is not the address of a pool, or it needs keys, or a timeout is less
            than 0.
        DeadlineExceeded: on entering the block, no pool answers at the address. A pool does not
            answer a client with a wrong token or an unknown key.
        Closed: on entering the block, the pool is closed or accepts no more clients. Every call
            raises it if the other process has exited, has closed its client, or is unreachable for
            ``heartbeat_timeout`` seconds.
    """
    timeout = check_timeout(timeout)
    entry = PoolEntry(
        address=address,
        keys=None if keys is None else read_client_keys(keys),
        insecure=insecure,
        heartbeat_timeout=check_heartbeat(heartbeat_timeout),
        max_message_bytes=max_message_bytes,
    )
    path = "" if model is None else os.fspath(model)
    return client_of(RemotePool(entry, connect_timeout), model=path, timeout=timeout)


def client_of(pool: RemotePool, *, model: str, timeout: float | None) -> Client:
    """Return a client that uses the pool of another process.

    Args:
        model: the path of the tokenizer, or "" for the path in the other process.
        timeout: the default time limit of every call, in seconds. None: no limit.
    """
    return Client(
        pool,
        RemoteControl(pool),
        model=model,
        timeout=timeout,
        serve=lambda client: _PoolAddress(pool.entry),
    )
