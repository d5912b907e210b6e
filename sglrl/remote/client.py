"""``connect``: a client for a pool that another process has launched.

To the ordinary ``Client`` and ``Driver`` the other process looks like one worker that accepts any
number of calls. ``remote/server.py`` routes these calls to the real workers.
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
    """The adapters of the owning pool, which checks their names in calls."""

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
    """Runs operations in the process that launched the pool: they apply to all its clients."""

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

    The first update creates a ``Sender``. Later updates use the same ``Sender`` with its device and
    host.
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
    """The address of the owning pool, which serves all remote clients."""

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

    The client has the functions of the ``Client`` of that process, except replacing adapters. The
    pool routes its calls together with all other calls. In ``update_weights`` this process sends
    the weights; all updates use the ``device`` and ``host`` of the first update. Exiting the block
    does not change the pool.

    Args:
        address: ``client.address`` in the process that called ``launch``. It holds a secret.
        keys: a folder with ``driver.public`` and one client's secret key, or the file of a client's
            secret key. ``sglrl keys`` created them for ``launch(keys=...)``.
        insecure: connect to another machine without keys.
        timeout: default for every call, in seconds; None: no limit.
        connect_timeout: seconds until the pool must have answered.
        model: path of the tokenizer for this process; None: the path in the other process.
        max_message_bytes: largest message accepted.
        heartbeat_timeout: over tcp, the connection is broken when nothing arrives for this many
            seconds; see ``launch``. All calls then end with ``Closed``: connect again. None: no
            heartbeats.

    Raises:
        UsageError: the address is not the address of a pool, or it needs keys, or a timeout is less
            than 0.
        DeadlineExceeded: on entering, when no pool answers at the address. A pool does not answer a
            client with a wrong token or an unknown key.
        Closed: on entering, when the pool is closed or accepts no more clients. Later, from every
            call, when the other process has exited, has closed its client, or is unreachable for
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
    """Return the client of a pool of another process.

    Args:
        model: path of the tokenizer; "": the path in the other process.
        timeout: default for every call, in seconds; None: no limit.
    """
    return Client(
        pool,
        RemoteControl(pool),
        model=model,
        timeout=timeout,
        serve=lambda client: _PoolAddress(pool.entry),
    )
