"""Pools: worker processes and the driver that talks to them; and ``spawn`` for plain actors."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import cloudpickle
import msgspec

from .actor import (
    Actor,
    BroadcastNamespace,
    EndpointSpec,
    StreamNamespace,
    UnaryCaller,
    WorkerHandle,
    constructor_arguments,
    endpoints_of,
)
from .config import FabricConfig, PoolConfig
from .core.members import LOST
from .driver import Driver
from .errors import Closed, UsageError, WorkerStartError
from .forkserver import ForkConnection, fork_server, tail
from .messages import ActorSpec, EngineSpec, Fork, Kill, Ready, WorkerSpec, rank_identity
from .net.zmq import ZmqRouter
from .weights.coordinator import WeightChannel

logger = logging.getLogger("sglrl.spawn")


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of a pool, as the driver knows it now.

    Attributes:
        id: index in the pool.
        pid: process id of its rank 0.
        state: "starting", "ready", "draining" or "lost".
        weight_version: policy version of its weights.
        device: "cpu", "cuda:0", ...
        load: calls it holds.
        window: calls it may hold.
    """

    id: int
    pid: int
    state: str
    weight_version: int
    device: str
    load: int
    window: int


class Birth(msgspec.Struct, kw_only=True):
    """A worker that is to be started: one process a rank."""

    bodies: Sequence[ActorSpec | EngineSpec]
    env: Mapping[str, str]


class _Worker:
    """The processes of one worker (all its ranks) and what they have said."""

    def __init__(self, index: int, identity: bytes, log: Path) -> None:
        self.index = index
        self.identity = identity
        self.log = log
        self.pids: dict[int, int] = {}
        self.running: set[int] = set()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.farewell = ""


class Pool:
    """Worker processes of one kind, from fork to end. Use as an async context manager.

    Raises (on entering):
        WorkerStartError: a worker ended, or did not become ready in time; nothing is left running.
    """

    def __init__(
        self,
        births: Sequence[Birth],
        *,
        preload: str,
        fabric: FabricConfig,
        config: PoolConfig,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._births = births
        self._preload = preload
        self._fabric_config = fabric
        self._config = config
        self._progress = on_progress or (lambda text: None)
        self._workers: dict[int, _Worker] = {}
        self._closing = False
        self._folder: Path | None = None
        self._connection: ForkConnection | None = None
        self._driver: Driver | None = None
        self.weights = WeightChannel(self.expel)

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise Closed("the pool has not been started; use 'async with'")
        return self._driver

    @property
    def workers(self) -> list[WorkerInfo]:
        found = []
        for worker in self._workers.values():
            member = self.driver.fabric.members[worker.index]
            ready = worker.ready.result() if _has_result(worker.ready) else None
            found.append(
                WorkerInfo(
                    id=worker.index,
                    pid=ready.pid if ready else worker.pids.get(0, 0),
                    state=member.state,
                    weight_version=self.weights.versions.get(worker.index, 0),
                    device=ready.device if ready else "",
                    load=member.load,
                    window=member.window,
                )
            )
        return found

    def ready(self, index: int) -> Ready:
        """What worker ``index`` said of itself when it became ready."""
        return self._workers[index].ready.result()

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await self._start()
        except TimeoutError:
            waiting = [w for w in self._workers.values() if not _has_result(w.ready)]
            await self.close()
            raise WorkerStartError(
                f"{len(waiting)} of {len(self._births)} workers were not ready within "
                f"{self._config.start_timeout:g} s (start_timeout)",
                worker=waiting[0].index if waiting else -1,
                output=tail(waiting[0].log) if waiting else "",
            ) from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _start(self) -> None:
        config = self._config
        server = fork_server(self._preload)
        self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=server.folder))
        address = config.address
        if address == "ipc":
            address = f"ipc://{self._folder}/router.sock"
        elif address == "tcp":
            address = "tcp://127.0.0.1:*"
        router = ZmqRouter(address, max_message_bytes=config.max_message_bytes)
        self._driver = driver = Driver(router, self._fabric_config, config.max_message_bytes)
        driver.on_ready = self._on_ready
        driver.on_starting = self._on_starting
        driver.on_gone = self._on_gone
        self.weights.attach(driver, router.address)
        driver.start()
        if self._preload != "plain":
            self._progress("importing SGLang (once per program)")
        self._connection = await ForkConnection.open(
            server, self._on_forked, self._on_exited, config.start_timeout
        )
        for index, birth in enumerate(self._births):
            self._fork(index, birth, router.address)
        await self._all_ready()

    def _fork(self, index: int, birth: Birth, address: str) -> None:
        assert self._folder is not None
        assert self._connection is not None
        identity = f"{index}-{secrets.token_hex(8)}".encode()
        worker = _Worker(index, identity, self._folder / f"worker-{index}.log")
        self._workers[index] = worker
        self.driver.add_worker(index, identity)
        for rank, body in enumerate(birth.bodies):
            if isinstance(body, EngineSpec) and body.engine == "sglang":
                self.weights.add_rank(index, rank, rank_identity(identity, rank))
            spec = WorkerSpec(
                index=index,
                identity=identity,
                address=address,
                max_message_bytes=self._config.max_message_bytes,
                body=body,
            )
            worker.running.add(rank)
            self._connection.send(
                Fork(
                    key=_key(index, rank),
                    spec=spec,
                    env=dict(birth.env),
                    log=str(worker.log),
                    cwd=os.getcwd(),
                    sys_path=[p or os.getcwd() for p in sys.path],
                )
            )

    async def _all_ready(self) -> None:
        """The first worker that fails ends the wait for all."""
        total = len(self._workers)
        pending: set[asyncio.Future[Ready]] = {w.ready for w in self._workers.values()}
        while pending:
            self._progress(f"starting workers ({total - len(pending)} of {total} ready)")
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()

    async def close(self) -> None:
        """End all calls with ``Closed``, then all workers: politely, then with SIGKILL."""
        if self._closing:
            return
        self._closing = True
        try:
            await self.weights.close()
            if self._driver is not None:
                self._driver.close()
                for worker in self._workers.values():
                    if worker.running and _has_result(worker.ready):
                        self._driver.shut_down_worker(worker.index)
                    else:
                        self._kill(worker)
            if self._connection is not None:
                running = [w for w in self._workers.values() if w.running]
                try:
                    async with asyncio.timeout(self._config.shutdown_timeout):
                        for worker in running:
                            await worker.gone.wait()
                except TimeoutError:
                    for worker in running:
                        self._kill(worker)
                    async with asyncio.timeout(self._config.shutdown_timeout):
                        for worker in running:
                            await worker.gone.wait()
        finally:
            # Also when this was cancelled: the fork server kills what the connection leaves.
            if self._connection is not None:
                self._connection.close()
            if self._driver is not None:
                self._driver.transport.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            for worker in self._workers.values():
                if not worker.ready.done():
                    worker.ready.cancel()
                elif not worker.ready.cancelled():
                    worker.ready.exception()

    def expel(self, index: int, reason: str) -> None:
        """End a worker that must not serve any more; its calls go on as when it is lost."""
        worker = self._workers[index]
        if self._closing or not worker.running:
            return
        logger.error("worker %d is ended: %s", index, reason)
        worker.farewell = reason
        self._kill(worker)
        self.driver.worker_lost(index, reason)

    # --- events -----------------------------------------------------------------------------------

    def _on_forked(self, key: int, pid: int) -> None:
        index, rank = divmod(key, _RANKS)
        self._workers[index].pids[rank] = pid

    def _on_starting(self, index: int, stage: str) -> None:
        logger.debug("worker %d: %s", index, stage)
        if not self._closing:
            self._progress(f"worker {index}: {stage}")

    def _on_ready(self, index: int, ready: Ready) -> None:
        future = self._workers[index].ready
        if not future.done():
            logger.debug("worker %d is ready (pid %d, %s)", index, ready.pid, ready.device)
            future.set_result(ready)

    def _on_gone(self, index: int, reason: str) -> None:
        """The worker cannot be talked to: end all its processes."""
        if not self._closing:
            self._workers[index].farewell = reason
            self._kill(self._workers[index])

    def _on_exited(self, key: int, status: int) -> None:
        index, rank = divmod(key, _RANKS)
        worker = self._workers[index]
        worker.running.discard(rank)
        if worker.running:
            # One rank is gone: the others cannot go on without it.
            if not self._closing:
                self._kill(worker)
        else:
            worker.gone.set()
        if self._closing:
            return
        reason = worker.farewell or (
            f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        )
        member = self.driver.fabric.members[index]
        if not worker.ready.done():
            worker.ready.set_exception(
                WorkerStartError(
                    f"worker {index} ended before it was ready: {reason}",
                    worker=index,
                    output=tail(worker.log),
                )
            )
        elif member.state is not LOST:
            logger.error(
                "worker %d was lost: %s; its last output:\n%s", index, reason, tail(worker.log, 20)
            )
        self.driver.worker_lost(index, reason)

    def _kill(self, worker: _Worker) -> None:
        if self._connection is not None:
            for rank in worker.running:
                self._connection.send(Kill(_key(worker.index, rank)))


_RANKS = 1024


def _key(index: int, rank: int) -> int:
    return index * _RANKS + rank


def _has_result(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


class ActorHandle:
    """A running pool of one actor class.

    ``await handle.method(...)`` goes to the least loaded worker; ``handle.stream.method(...)`` is
    an async iterator; ``await handle.broadcast.method(...)`` asks all; ``handle[i]`` is worker i.
    Every call takes ``timeout=`` in seconds beside the endpoint's own arguments.
    """

    def __init__(self, cls: type[Actor], pool: Pool) -> None:
        self._cls = cls
        self._specs: dict[str, EndpointSpec] = endpoints_of(cls)
        self._pool = pool

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.close()

    async def close(self) -> None:
        """End every call and every worker; safe to call again."""
        await self._pool.close()

    @property
    def workers(self) -> list[WorkerInfo]:
        """The pool's workers, in order."""
        return self._pool.workers

    @property
    def stream(self) -> StreamNamespace:
        return StreamNamespace(self._pool.driver, self._specs, self._cls.__name__)

    @property
    def broadcast(self) -> BroadcastNamespace:
        return BroadcastNamespace(self._pool.driver, self._specs, self._cls.__name__)

    def __getitem__(self, index: int) -> WorkerHandle:
        if not 0 <= index < len(self._pool.workers):
            raise UsageError(f"there is no worker {index}; this pool has {len(self._pool.workers)}")
        return WorkerHandle(self._pool.driver, self._specs, self._cls.__name__, index)

    def __len__(self) -> int:
        return len(self._pool.workers)

    def __getattr__(self, name: str) -> UnaryCaller:
        if name.startswith("_"):
            raise AttributeError(name)
        caller = getattr(
            WorkerHandle(self._pool.driver, self._specs, self._cls.__name__, None), name
        )
        # The next access finds it without coming here.
        self.__dict__[name] = caller
        return caller  # type: ignore[no-any-return]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._specs})


def spawn(
    actor: type[Actor],
    /,
    *args: Any,
    replicas: int = 1,
    env: Mapping[str, str] | None = None,
    window: int = 64,
    routing: tuple[str, ...] = ("requests",),
    max_queue: int = 100_000,
    start_timeout: float = 60.0,
    **kwargs: Any,
) -> ActorHandle:
    """Run an actor class in worker processes: ``async with sglrl.spawn(Judge, ...) as judges``.

    Args:
        actor: a subclass of ``sglrl.Actor``. Defined in a module, it is imported there by name;
            defined in ``__main__`` or in a function, it travels by value. The user's script is
            never run again.
        args, kwargs: for its ``__init__``, typed by the annotations.
        replicas: worker processes.
        env: environment variables of the workers, beside the driver's own.
        window: calls one worker works on at a time; the rest wait at the driver.
        routing: see ``sglrl.core.routing``.
        max_queue: calls that may wait at the driver before ``Overloaded`` is raised.
        start_timeout: seconds until all workers must be ready.

    Raises:
        UsageError: the class declares no endpoint, or an argument has the wrong type.
        WorkerStartError: on entering, when ``__init__`` raises in the worker.
    """
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise UsageError(f"spawn takes a subclass of sglrl.Actor, got {actor!r}")
    if not endpoints_of(actor):
        raise UsageError(
            f"{actor.__name__} declares no endpoint; mark its methods with @sglrl.endpoint"
        )
    for name, value in (("replicas", replicas), ("window", window)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} must be at least 1, got {value!r}")
    body, frames = constructor_arguments(actor).encode(args, kwargs)
    target = _importable_as(actor)
    spec = ActorSpec(
        target=target,
        # Only between this process and its own fork server, over their private socket.
        code=b"" if target else cloudpickle.dumps(actor),
        args=body,
        frames=[bytes(f) for f in frames],
        window=window,
    )
    pool = Pool(
        [Birth(bodies=[spec], env=dict(env or {})) for _ in range(replicas)],
        preload="plain",
        fabric=FabricConfig(routing=routing, max_queue=max_queue),
        config=PoolConfig(start_timeout=start_timeout),
    )
    return ActorHandle(actor, pool)


def _importable_as(cls: type) -> str:
    """ "module:qualname", or "" when importing that would not give this class."""
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__" or "<" in cls.__qualname__:
        return ""
    found: Any = module
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return f"{cls.__module__}:{cls.__qualname__}" if found is cls else ""
