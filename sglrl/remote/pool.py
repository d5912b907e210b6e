"""``RemotePool``: the connection of a remote client to the process that launched the pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from ..actors.handles import UnaryCaller
from ..client.client import Client
from ..config import check_timeout
from ..control.operations import Operation, operations_of
from ..core.members import READY, RETIRED
from ..core.weight_update import Member
from ..driver.lifetime import Lifetime
from ..driver.worker_info import QueueInfo, WorkerInfo
from ..errors import Closed, DeadlineExceeded, UsageError
from ..transport.addresses import check_address
from ..transport.zmq import ZmqDealer
from ..weights.update_report import UpdateReport
from ..wire.calls import PROTOCOL_VERSION, Load
from ..wire.codec import encode
from ..wire.engine import EngineInfo
from ..wire.processes import PoolEntry
from ..wire.remote import Hello, Leave, PoolStatus, Requests
from ..wire.weights import ModelDescription, Shard
from .driver import PoolConnection, RemoteDriver

CONNECT_SECONDS: Final = 60.0
"""Seconds that a client waits for the pool's first answer."""
_POLL_SECONDS: Final = 0.2
"""Seconds between two checks that the pool was not closed before its first answer."""
_CHECK_SECONDS = 15.0
"""Seconds between two checks that the pool has not dropped a client with pending calls."""
_GONE: Final = "the pool's process has exited or has closed the pool"
_BROKEN: Final = (
    "the connection to the pool's process broke: that process has exited or has closed the pool"
)


class RemoteWeights:
    """The weights of a remote pool's workers. ``weights.port.WeightsPort`` documents the methods.

    Args:
        ask: runs the operation of ``Client`` with a given name in the pool's process.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask
        self._description: ModelDescription | None = None
        self.version = 0
        self.lora_versions: dict[str, int] = {}
        self.on_version: set[Callable[[], None]] = set()
        self.address = ""
        self.host = "127.0.0.1"

    def set_version(self, version: int, loras: Mapping[str, int] | None = None) -> None:
        """Record the versions of the pool, unless later versions are known already.

        The result of an update may arrive before the pool's next status, so versions may arrive
        out of order.

        Args:
            loras: the versions of adapters by name.
        """
        known = self.lora_versions
        new = {name: v for name, v in (loras or {}).items() if v > known.get(name, -1)}
        if version > self.version or new:
            self.version = max(version, self.version)
            self.lora_versions.update(new)
            for listener in list(self.on_version):
                listener()

    async def describe(self, timeout: float | None) -> ModelDescription:
        if self._description is None or self._description.open:
            self._description = await self._ask("_describe", timeout=timeout)
        return self._description

    async def checksums(self, names: list[str], timeout: float | None) -> dict[Member, list[Shard]]:
        return dict(await self._ask("_checksums", names=names, timeout=timeout))


class RemotePool:
    """The pool of another process. ``driver.port.PoolPort`` documents the methods.

    Args:
        connect_timeout: seconds to wait for the first answer of the pool.

    Raises:
        UsageError: the address is not the address of a pool, or it needs keys, or
            ``connect_timeout`` is less than 0.
    """

    def __init__(self, entry: PoolEntry, connect_timeout: float = CONNECT_SECONDS) -> None:
        address = entry.address
        url, _, token = address.partition("#") if isinstance(address, str) else ("", "", "")
        if not token:
            raise UsageError(f"{address!r} is not the address of a pool; pass client.address")
        check_address(url, keys=entry.keys is not None, insecure=entry.insecure)
        check_timeout(connect_timeout, "connect_timeout")
        self._lifetime = Lifetime(f"the Client connected to {url}")
        self._url, self._token = url, token
        self.entry = entry
        self._connect_timeout = connect_timeout
        self.weights = RemoteWeights(self._ask_by_name)
        self.engine: EngineInfo | None = None
        self._driver: RemoteDriver | None = None
        self._check: asyncio.TimerHandle | None = None

    @property
    def driver(self) -> RemoteDriver:
        if self._driver is None:
            raise Closed("the pool has not been started; use 'async with'")
        return self._driver

    async def ask(
        self, operation: Operation, arguments: dict[str, Any], limit: float | None
    ) -> Any:
        """Run an operation of ``Client`` in the pool's process, and return its result.

        Args:
            limit: seconds until ``DeadlineExceeded``. None: no limit.
        """
        result = await UnaryCaller(self.driver, operation).call((), arguments, limit)
        if isinstance(result, UpdateReport):
            # The caller may read the version before the pool's next status arrives.
            self.weights.set_version(result.version)
        return result

    async def _ask_by_name(self, name: str, **arguments: Any) -> Any:
        operation = operations_of(Client)[name]
        return await self.ask(operation, arguments, operation.limit(arguments, None))

    async def enter(self) -> None:
        self._lifetime.enter()
        if _is_gone(self._url):
            raise Closed(f"there is no pool at {self._url}: its process has exited or closed it")
        dealer = self._connect()
        self._lifetime.opened(self)
        self._driver = driver = RemoteDriver(
            PoolConnection(dealer, self._url), self.entry.max_message_bytes
        )
        driver.on_news = self._on_news
        driver.start()
        self._check_pool_exists()
        try:
            with contextlib.suppress(Closed):  # refused in the handshake: no answer will arrive
                dealer.send([encode(Hello(PROTOCOL_VERSION, self.entry.max_message_bytes))])
            async with asyncio.timeout(self._connect_timeout):
                admitted = await driver.admitted
        except TimeoutError:
            await self.close()
            raise self._no_answer() from None
        except BaseException:
            await self.close()
            raise
        driver.max_message_bytes = min(self.entry.max_message_bytes, admitted.max_message_bytes)
        self.weights.address = admitted.weights_address
        self.engine = admitted.engine
        self._on_news()
        self._check = driver.loop.call_later(_CHECK_SECONDS, self._make_sure)

    def _connect(self) -> ZmqDealer:
        loop = asyncio.get_running_loop()
        # The dealer's thread must not keep a client alive that the program forgot to close.
        on_break = weakref.WeakMethod(self._on_break)

        def tell() -> None:
            callback = on_break()
            if callback is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(callback)

        return ZmqDealer(
            self._url,
            f"client/{self._token}/{secrets.token_hex(8)}".encode(),
            max_message_bytes=self.entry.max_message_bytes,
            keys=self.entry.keys,
            on_break=tell,
            heartbeat_timeout=self.entry.heartbeat_timeout,
        )

    def _no_answer(self) -> DeadlineExceeded:
        hint = ""
        if self.entry.keys is not None:
            hint = ", or it does not accept this key"
        elif self._url.startswith("tcp"):
            hint = ", or it needs keys="
        return DeadlineExceeded(
            f"no answer from {self._url} within {self._connect_timeout:g} s: the pool has ended, "
            f"or the part after '#' in the address is not its token{hint}; pass the current "
            "client.address"
        )

    def _make_sure(self) -> None:
        """Send an empty message if calls are pending, to find out if the pool dropped this client.

        The pool drops a client that does not read its messages. It cannot notify the client then,
        because the connection is full. It answers the client's next message with ``Rejected``.
        """
        if self.driver.fabric.calls:
            self.driver.send_to_peer(b"", encode(Requests([])))
        self._check = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._make_sure)

    def _on_break(self) -> None:
        driver = self.driver
        # Before the pool's first answer, a break may be a failed handshake.
        if not self._lifetime.closing and driver.admitted.done() and not driver.fabric.closed:
            reason = _BROKEN
            if self.entry.heartbeat_timeout is not None and self._url.startswith("tcp"):
                reason += (
                    f", or nothing arrived from it for {self.entry.heartbeat_timeout:g} s "
                    "(heartbeat_timeout)"
                )
            driver.lose(reason)
            # ZeroMQ reconnects by itself. If the pool still runs, this message makes the pool drop
            # this client.
            driver.send_to_peer(b"", encode(Leave()))

    def _check_pool_exists(self) -> None:
        """Check that the pool was not closed. Repeat the check until the pool has answered.

        ZeroMQ does not report a pool that was closed before the connection was made.
        """
        driver = self.driver
        if self._lifetime.closing or driver.admitted.done():
            return
        if _is_gone(self._url):
            driver.lose(_GONE)
        else:
            driver.loop.call_later(_POLL_SECONDS, self._check_pool_exists)

    @property
    def status(self) -> PoolStatus:
        return self.driver.status

    def _on_news(self) -> None:
        self.weights.set_version(self.status.version, self.status.lora_versions)

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers in the latest status. If the connection has ended, all are retired."""
        closed = self.driver.fabric.closed
        return [
            WorkerInfo(
                id=w.id,
                pid=w.pid,
                state=RETIRED if closed else w.state,
                weight_version=w.weight_version,
                device=w.device,
                load=w.load,
                window=w.window,
                host=w.host,
                kept_bytes=w.kept_bytes,
            )
            for w in self.status.workers
        ]

    @property
    def queue(self) -> QueueInfo:
        """The queue in the latest status."""
        status = self.status
        return QueueInfo(
            calls=status.queued, bytes=status.queued_bytes, clients=status.queued_clients
        )

    def loads(self) -> tuple[list[Load], int]:
        status = self.status
        return [w.reported for w in status.workers if w.state == READY], status.queued

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """Close the connection. The pool keeps running."""
        driver = self._driver
        if driver is None or not await self._lifetime.begin_closing(
            driver, drain=drain, timeout=timeout
        ):
            return
        if self._check is not None:
            self._check.cancel()
        driver.close()
        with contextlib.suppress(Closed):
            driver.send_to_peer(b"", encode(Leave()))
        driver.transport.close()
        self._lifetime.closed()

    def closes_at_exit(self) -> None:
        self._lifetime.closes_at_exit()

    def warn_unclosed(self) -> None:
        self._lifetime.warn_unclosed()


def _is_gone(url: str) -> bool:
    """Return whether ``url`` is an ipc socket whose file is missing, so that no process listens.

    ZeroMQ would wait until a process listens there.
    """
    return url.startswith("ipc://") and not os.path.exists(url.removeprefix("ipc://"))
