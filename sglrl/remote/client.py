"""``connect``: a client for a pool that another process has launched.

To the ordinary ``Client`` and ``Driver`` the other process looks like one worker that accepts any
number of calls. ``remote/server.py`` routes these calls to the real workers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ..config import HEARTBEAT_TIMEOUT, check_timeout
from ..driver.driver import Driver
from ..errors import UnknownAdapter
from ..inference.adapters import LoraInfo
from ..inference.client import Client
from ..inference.sleeping import tag_list
from ..weights.deadline import Deadline, turn
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateRequest
from ..wire.engine import EngineInfo
from ..wire.processes import ClientKeys
from .pool import CONNECT_SECONDS, RemotePool, a_bit_more, not_here


class _RemotePausing:
    """Forwards pause, resume and abort to the owning pool: they apply to all its clients."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool

    def start(self) -> None: ...

    async def pause(self, mode: str, timeout: float | None) -> None:
        await self._pool.ask("pause", mode, timeout, timeout=a_bit_more(timeout))

    async def resume(self, timeout: float | None) -> None:
        await self._pool.ask("resume", timeout, timeout=a_bit_more(timeout))

    async def abort(self, worker: int | None, timeout: float | None) -> int:
        ended: int = await self._pool.ask("abort", worker, timeout, timeout=a_bit_more(timeout))
        return ended


class _RemoteSleeping:
    """Forwards sleep and wake to the owning pool: they apply to all its clients."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool

    def start(self) -> None: ...

    async def sleep(
        self, tags: Iterable[str], inflight: str, keep_weights: bool, timeout: float | None
    ) -> None:
        given = tag_list(tags), inflight, keep_weights, timeout
        await self._pool.ask("sleep", *given, timeout=a_bit_more(timeout))

    async def wake(self, tags: Iterable[str] | None, timeout: float | None) -> None:
        given = None if tags is None else tag_list(tags)
        await self._pool.ask("wake", given, timeout, timeout=a_bit_more(timeout))


class _RemoteAdapters:
    """Adapters of the owning pool. It checks the names of adapters in calls, and reads folders."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool

    @property
    def loaded(self) -> Mapping[str, LoraInfo]:
        raise not_here("adapters are listed")

    @property
    def versions(self) -> Mapping[str, int]:
        return self._pool.weights.lora_versions

    async def all(self) -> dict[str, LoraInfo]:
        found: dict[str, LoraInfo] = await self._pool.ask("loras")
        return found

    async def start(self, driver: Driver, info: EngineInfo) -> None: ...

    def check(self, name: Any) -> str:
        if not isinstance(name, str) or not name:
            raise UnknownAdapter(f"lora must be the name of an adapter, got {name!r}")
        return name

    def route_version(self, name: str, version: int) -> int:
        return version

    async def load(self, name: Any, adapter: Any, config: Any, timeout: float) -> LoraInfo:
        if config is not None or not isinstance(adapter, str | os.PathLike):
            raise not_here("adapters that are not folders are loaded")
        found: LoraInfo = await self._pool.ask(
            "load_lora", name, _absolute(adapter), timeout, timeout=a_bit_more(timeout)
        )
        return found

    async def replace(
        self, name: Any, adapter: Any, config: Any, request: UpdateRequest
    ) -> UpdateReport:
        raise not_here("adapters are replaced")

    async def unload(self, name: Any, timeout: float) -> None:
        await self._pool.ask("unload_lora", name, timeout, timeout=a_bit_more(timeout))


class _RemoteSender:
    """Sends weights from this process to the pool's workers.

    The first update creates a ``Sender``. Later updates use the same ``Sender`` with its device and
    host.
    """

    def __init__(
        self, pool: RemotePool, keys: str | os.PathLike[str] | None, insecure: bool
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._insecure = insecure
        self._sender: Any = None
        self._connecting = asyncio.Lock()

    async def connect(self, device: Any, host: str | None, timeout: float) -> float:
        raise not_here("the group for weight updates is formed ahead of the first one")

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
                        keys=self._keys,
                        insecure=self._insecure,
                        heartbeat_timeout=self._pool.heartbeat_timeout,
                    )
        report: UpdateReport = await self._sender._update(weights, request)
        self._pool.weights.set_version(report.version)
        return report

    async def update_from_disk(self, path: Any, request: UpdateRequest) -> UpdateReport:
        request.check_values()
        report: UpdateReport = await self._pool.ask(
            "update_weights_from_disk",
            _absolute(path),
            request.version,
            request.inflight,
            request.partial,
            request.timeout,
            request.drain_timeout,
            request.wait,
            request.check_finite,
            request.same_version,
        )
        self._pool.weights.set_version(report.version)
        return report

    async def close(self) -> None:
        if self._sender is not None:
            await self._sender.close()


class _PoolAddress:
    """The address of the owning pool, which serves all remote clients."""

    def __init__(self, address: str, pool: RemotePool) -> None:
        self.address = address
        self._pool = pool

    @property
    def way_in(self) -> tuple[str, ClientKeys | None, bool, float | None]:
        return self.address, *self._pool.connect_options

    async def close(self) -> None: ...


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.path.expanduser(path))


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

    The client has the functions of the ``Client`` of that process, except adding and removing
    workers, and replacing and listing adapters. The pool routes its calls together with all other
    calls. In ``update_weights`` this process sends the weights; all updates use the ``device`` and
    ``host`` of the first update. Exiting the block does not change the pool.

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
    pool = RemotePool(
        address,
        keys=keys,
        insecure=insecure,
        connect_timeout=connect_timeout,
        max_message_bytes=max_message_bytes,
        heartbeat_timeout=heartbeat_timeout,
    )
    path = "" if model is None else os.fspath(model)
    return client_of(pool, address, model=path, timeout=timeout, keys=keys, insecure=insecure)


def client_of(
    pool: RemotePool,
    address: str,
    *,
    model: str,
    timeout: float | None,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> Client:
    """Return the client of a pool of another process.

    Args:
        model: path of the tokenizer; "": the path in the other process.
        keys, insecure: the connection of this process's weight sender, see ``connect``.
    """
    return Client(
        pool,
        model=model,
        timeout=timeout,
        sender=_RemoteSender(pool, keys, insecure),
        pausing=_RemotePausing(pool),
        sleeping=_RemoteSleeping(pool),
        adapters=_RemoteAdapters(pool),
        serve=lambda client: _PoolAddress(address, pool),
    )
