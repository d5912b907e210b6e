"""``connect``: a client for a pool that another process has launched.

To the ordinary ``Client`` and ``Driver`` the other process looks like one worker that takes any
number of calls: ``remote/server.py`` gives them to its real workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import weakref
from typing import Any, Final, Self

from ..actors.actor import UnaryCaller, endpoints_of
from ..config import HEARTBEAT_TIMEOUT, FabricConfig, PoolConfig, check_heartbeat, check_timeout
from ..core.concurrency import Load
from ..core.members import READY, RETIRED
from ..driver.pool import Pool, QueueInfo, WorkerInfo
from ..errors import Closed, DeadlineExceeded, UsageError
from ..inference.client import Client
from ..inference.engine_controls import Controls
from ..transport.curve_keys import read_client_keys
from ..transport.zmq import ZmqDealer, check_address
from ..weights.channel import WeightChannel
from ..weights.deadline import Deadline, turn
from ..weights.local_sender import LocalSender
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateRequest
from ..wire.calls import PROTOCOL_VERSION, Ready
from ..wire.codec import encode
from ..wire.engine import EngineInfo
from ..wire.processes import ClientKeys
from ..wire.remote import Hello, Leave, PoolStatus, Requests
from ..wire.weights import ModelDescription, Shard
from .driver import Line, RemoteDriver
from .server import PoolEndpoints

_CONNECT_SECONDS: Final = 60.0
_GRACE: Final = 10.0
_LOOK_SECONDS: Final = 0.2
"""Between two looks at whether a pool that has not answered yet is gone."""
_CHECK_SECONDS = 15.0
"""After which a client that waits makes sure that the pool still knows it."""
_GONE: Final = "the process that has the pool is gone or has closed it"
_BROKEN: Final = (
    "the connection to the pool's process broke: that process is gone or has closed the pool"
)


def _a_bit_more(timeout: float | None) -> float | None:
    """Of what is asked of the pool, which keeps to ``timeout`` itself."""
    timeout = check_timeout(timeout)
    return None if timeout is None else timeout + _GRACE


class _RemoteWeights(WeightChannel):
    """What a client asks of the weights; updates go through ``sglrl.weights.Sender``."""

    def __init__(self, pool: RemotePool) -> None:
        super().__init__(lambda worker, reason: None)
        self._of = pool
        self.sender_address = ""

    @property
    def address(self) -> str:
        return self.sender_address

    async def describe(self, timeout: float | None) -> ModelDescription:
        if self._description is None:
            self._description = await self._of.ask(
                "describe", timeout, timeout=_a_bit_more(timeout)
            )
        return self._description

    async def checksums(
        self, names: list[str], timeout: float | None
    ) -> dict[tuple[int, int], list[Shard]]:
        found = await self._of.ask("checksums", names, timeout, timeout=_a_bit_more(timeout))
        return dict(found)


class RemotePool(Pool):
    """The pool of another process."""

    weights: _RemoteWeights

    def __init__(
        self,
        address: str,
        *,
        keys: str | os.PathLike[str] | ClientKeys | None,
        insecure: bool,
        connect_timeout: float,
        max_message_bytes: int,
        heartbeat_timeout: float | None,
    ) -> None:
        url, _, token = address.partition("#") if isinstance(address, str) else ("", "", "")
        super().__init__(
            [],
            name=f"the Client connected to {url}",
            preload="plain",
            fabric=FabricConfig(),
            config=PoolConfig(),
        )
        if not token:
            raise UsageError(f"{address!r} is no address of a pool; pass client.address")
        check_address(url, keys=keys is not None, insecure=insecure)
        check_timeout(connect_timeout, "connect_timeout")
        self._url, self._token = url, token
        self._client_keys: ClientKeys | None = None
        if keys is not None:
            self._client_keys = keys if isinstance(keys, ClientKeys) else read_client_keys(keys)
        self._connect_timeout = connect_timeout
        self._max_message_bytes = max_message_bytes
        self.heartbeat_timeout = check_heartbeat(heartbeat_timeout)
        self.weights = _RemoteWeights(self)
        self.model = ""
        self._check: asyncio.TimerHandle | None = None
        self._engine: EngineInfo | None = None
        self._specs = endpoints_of(PoolEndpoints)

    async def ask(self, endpoint: str, *args: Any, timeout: float | None = None) -> Any:
        """Of the pool as a whole: one of ``PoolEndpoints``."""
        return await UnaryCaller(self.driver, self._specs[endpoint], None)(*args, timeout=timeout)

    async def __aenter__(self) -> Self:
        self._enter_once()
        loop = asyncio.get_running_loop()
        # The thread that calls ``tell`` must not keep a client alive that is never closed.
        on_break = weakref.WeakMethod(self._on_break)

        def tell() -> None:
            found = on_break()
            if found is not None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(found)

        if _is_gone(self._url):
            raise Closed(f"there is no pool at {self._url}: its process is gone or has closed it")
        identity = f"client/{self._token}/{secrets.token_hex(8)}".encode()
        dealer = ZmqDealer(
            self._url,
            identity,
            max_message_bytes=self._max_message_bytes,
            keys=self._client_keys,
            on_break=tell,
            heartbeat_timeout=self.heartbeat_timeout,
        )
        self._opened()
        driver = RemoteDriver(Line(dealer, self._url), self._max_message_bytes)
        self._driver = driver
        driver.on_news = self._on_news
        driver.start()
        self._look()
        try:
            with contextlib.suppress(Closed):  # refused in the handshake: nobody will answer
                dealer.send([encode(Hello(PROTOCOL_VERSION, self._max_message_bytes))])
            async with asyncio.timeout(self._connect_timeout):
                admitted = await driver.admitted
        except TimeoutError:
            await self.close()
            hint = ""
            if self._client_keys is not None:
                hint = ", or it does not know this key"
            elif self._url.startswith("tcp"):
                hint = ", or it wants keys="
            raise DeadlineExceeded(
                f"nobody answered at {self._url} within {self._connect_timeout:g} s: no pool is "
                "there any more, or what is behind '#' in the address is not its token (a pool "
                f"does not answer strangers){hint}; pass what client.address says now"
            ) from None
        except BaseException:
            await self.close()
            raise
        driver.max_message_bytes = min(self._max_message_bytes, admitted.max_message_bytes)
        self.model = admitted.model
        self.weights.sender_address = admitted.weights_address
        self._engine = admitted.engine
        self._on_news()
        self._check = loop.call_later(_CHECK_SECONDS, self._make_sure)
        return self

    def _make_sure(self) -> None:
        """A client that does not read for so long that no more fits the connection is forgotten,
        and cannot be told. Who says something to a pool that does not know it is told so."""
        if self.driver.fabric.calls:
            self.driver.send_to_peer(b"", encode(Requests([])))
        self._check = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._make_sure)

    def _on_break(self) -> None:
        driver = self._driver
        assert isinstance(driver, RemoteDriver)
        # Before it was admitted, a handshake may have failed.
        if not self._closing and driver.admitted.done() and not driver.fabric.closed:
            reason = _BROKEN
            if self.heartbeat_timeout is not None and self._url.startswith("tcp"):
                reason += (
                    f", or nothing arrived from it for {self.heartbeat_timeout:g} s "
                    "(heartbeat_timeout)"
                )
            driver.lose(reason)
            # ZeroMQ connects again by itself. A pool that is still there then forgets this client.
            driver.send_to_peer(b"", encode(Leave()))

    def _look(self) -> None:
        """Of a pool that was closed before ZeroMQ had a connection nobody tells."""
        driver = self._driver
        assert isinstance(driver, RemoteDriver)
        if self._closing or driver.admitted.done():
            return
        if _is_gone(self._url):
            driver.lose(_GONE)
        else:
            driver.loop.call_later(_LOOK_SECONDS, self._look)

    @property
    def status(self) -> PoolStatus:
        assert isinstance(self._driver, RemoteDriver)
        return self._driver.status

    def _on_news(self) -> None:
        self.heard_of(self.status.version)

    def heard_of(self, version: int) -> None:
        """The pool has this version; news may come later than what a sender was told."""
        if version > self.weights.version:
            self.weights.version = version
            for told in list(self.weights.on_version):
                told()

    @property
    def workers(self) -> list[WorkerInfo]:
        """As the pool last said. When the connection is lost or closed, all are retired."""
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
            )
            for w in self.status.workers
        ]

    @property
    def queue(self) -> QueueInfo:
        """As the pool last said."""
        status = self.status
        return QueueInfo(
            calls=status.queued, bytes=status.queued_bytes, clients=status.queued_clients
        )

    def ready(self, index: int) -> Ready:
        return Ready(PROTOCOL_VERSION, 0, 1, [], "", self._engine)

    async def full(self, timeout: float | None) -> None:
        # The pool's own error says which worker it waits for.
        await self.ask("full", timeout, timeout=_a_bit_more(timeout))

    async def remove(self, index: int, timeout: float | None) -> None:
        raise _not_here("workers are removed")

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """Take leave; the pool goes on."""
        driver = self._driver
        if self._closing or driver is None or driver.is_copied:
            return
        driver.check_loop()
        if drain:
            await self._drain(timeout)
            if self._closing:
                return
        self._closing = True
        if self._check is not None:
            self._check.cancel()
        driver.close()
        with contextlib.suppress(Closed):
            driver.send_to_peer(b"", encode(Leave()))
        await self.weights.close()
        driver.transport.close()
        self._closed()


class _RemoteControls(Controls):
    """Standing still and letting go is the pool's, so that it is the same for all its clients."""

    _pool: RemotePool

    async def pause(self, mode: str, timeout: float | None) -> None:
        await self._pool.ask("pause", mode, timeout, timeout=_a_bit_more(timeout))

    async def resume(self, timeout: float | None) -> None:
        await self._pool.ask("resume", timeout, timeout=_a_bit_more(timeout))

    async def abort(self, worker: int | None, timeout: float | None) -> int:
        ended: int = await self._pool.ask("abort", worker, timeout, timeout=_a_bit_more(timeout))
        return ended


class _RemoteUpdates(LocalSender):
    """This process sends, through a ``Sender`` that is made for the first update and keeps its
    device and host."""

    def __init__(
        self, pool: RemotePool, keys: str | os.PathLike[str] | None, insecure: bool
    ) -> None:
        super().__init__(pool.weights)
        self._pool = pool
        self._keys = keys
        self._insecure = insecure
        self._sender: Any = None
        self._connecting = asyncio.Lock()

    async def connect(self, device: Any, host: str, timeout: float) -> float:
        raise _not_here("the group for weight updates is formed ahead of the first one")

    async def update(
        self,
        weights: Any,
        request: UpdateRequest,
        *,
        device: Any = None,
        host: str = "127.0.0.1",
    ) -> UpdateReport:
        request.check_values()
        engine = self._pool.ready(0).engine
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
                        host=host,
                        timeout=deadline.left,
                        keys=self._keys,
                        insecure=self._insecure,
                        heartbeat_timeout=self._pool.heartbeat_timeout,
                    )
        report: UpdateReport = await self._sender._update(weights, request)
        self._pool.heard_of(report.version)
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
        )
        self._pool.heard_of(report.version)
        return report

    async def leave(self) -> None:
        """An update under way is given up."""
        if self._sender is not None:
            await self._sender.close()


class RemoteClient(Client):
    """A ``Client`` of another process's pool: made by ``sglrl.connect``."""

    _pool: RemotePool

    def __init__(
        self,
        pool: RemotePool,
        address: str,
        *,
        model: str | None,
        timeout: float | None,
        keys: str | os.PathLike[str] | None,
        insecure: bool,
    ) -> None:
        super().__init__(pool, model=model or "", timeout=timeout)
        self._given_address = address
        self._insecure = insecure
        self._controls = _RemoteControls(pool, timeout)
        self._weights = self._updates = _RemoteUpdates(pool, keys, insecure)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if not self.model:
            self.model = self._tokenizer_box.model = self._pool.model
        return self

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """Take leave: this client's calls end with ``Closed`` (``drain``: are awaited first). The
        pool goes on."""
        await self._updates.leave()
        await super().close(drain=drain, timeout=timeout)

    @property
    def address(self) -> str:
        return self._given_address

    @property
    def _way_in(self) -> tuple[str, ClientKeys | None, bool, float | None]:
        pool = self._pool
        return self._given_address, pool._client_keys, self._insecure, pool.heartbeat_timeout

    async def add_workers(self, n: int = 1) -> list[int]:
        raise _not_here("workers are added")

    def _loads(self) -> tuple[list[Load], int]:
        self._running()
        status = self._pool.status
        loads = [
            Load(w.kv_usage, w.waiting, w.preempted) for w in status.workers if w.state == READY
        ]
        return loads, status.queued


def _is_gone(url: str) -> bool:
    """Without the socket's file nobody listens; ZeroMQ would wait for somebody to come."""
    return url.startswith("ipc://") and not os.path.exists(url.removeprefix("ipc://"))


def _absolute(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(path)


def _not_here(what: str) -> UsageError:
    return UsageError(f"{what} by the process that launched the pool")


def connect(
    address: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    timeout: float | None = None,
    connect_timeout: float = _CONNECT_SECONDS,
    model: str | os.PathLike[str] | None = None,
    max_message_bytes: int = 256 << 20,
    heartbeat_timeout: float | None = HEARTBEAT_TIMEOUT,
) -> Client:
    """A client for the pool of another process: ``async with sglrl.connect(address) as client``.

    It does what the ``Client`` of that process does, except for adding and removing workers, and
    its calls are routed with all others. In ``update_weights`` this process sends; ``device`` and
    ``host`` are those of the first update. Leaving the block leaves the pool as it is.

    Args:
        address: ``client.address`` in the process that called ``launch``. It holds a secret.
        keys: a folder with ``driver.public`` and one client's secret key, or such a secret key
            file, of those that ``sglrl keys`` made for ``launch(keys=...)``.
        insecure: connect to another machine without keys.
        timeout: default for every call, in seconds; None: no limit.
        connect_timeout: seconds until the pool must have answered.
        model: where this process finds the tokenizer; None: where the other one does.
        max_message_bytes: largest message accepted.
        heartbeat_timeout: over tcp, the connection is broken when nothing arrives for this many
            seconds; see ``launch``. All calls then end with ``Closed``: connect again. None: no
            heartbeats.

    Raises:
        UsageError: this is no such address, or it needs keys, or a timeout is less than 0.
        DeadlineExceeded: on entering, when nobody answers there. A pool does not answer strangers:
            who has another token than its own, or no key that it knows.
        Closed: on entering, when there is no such pool any more, or it takes no more clients.
            Later, of every call, once the other process is gone, has closed its client, or cannot
            be reached for ``heartbeat_timeout`` seconds.
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
    return RemoteClient(
        pool,
        address,
        model=None if model is None else os.fspath(model),
        timeout=timeout,
        keys=keys,
        insecure=insecure,
    )


def reconnect(
    address: str,
    keys: ClientKeys | None,
    insecure: bool,
    heartbeat_timeout: float | None,
    model: str,
    timeout: float | None,
    max_message_bytes: int,
) -> RemoteClient:
    """``connect`` for a process of the same program (``Client._way_in``), which is given the keys
    themselves."""
    pool = RemotePool(
        address,
        keys=keys,
        insecure=insecure,
        connect_timeout=_CONNECT_SECONDS,
        max_message_bytes=max_message_bytes,
        heartbeat_timeout=heartbeat_timeout,
    )
    return RemoteClient(pool, address, model=model, timeout=timeout, keys=None, insecure=insecure)
