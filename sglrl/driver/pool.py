"""The pool of one ``launch`` or ``spawn``: starts, replaces and closes workers, owns the driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from ..config import FabricConfig, PoolConfig, check_target, check_timeout, raise_file_limit
from ..core.driver_listener import DriverListener
from ..core.members import DRAINING, READY, RETIRED, STALE, SYNCING
from ..core.seeds import process_seed
from ..core.supervision import Supervision
from ..errors import Closed, DeadlineExceeded, UsageError, WorkerLost, WorkerStartError
from ..transport.curve_keys import read_driver_keys
from ..transport.zmq import ZmqRouter
from ..unclosed import warn_unless_closed
from ..weights.channel import WeightChannel
from ..wire.calls import Ready
from ..wire.processes import ActorSpec, ClientKeys, EngineSpec, WorkerSpec
from ..wire.weights import rank_identity
from .driver import Driver
from .fork_server import tail
from .hang_monitor import HangMonitor
from .worker_info import QueueInfo, WorkerInfo
from .worker_processes import Processes, Worker

logger = logging.getLogger("sglrl.pool")

SYNC_TIMEOUT = 120.0
"""Seconds for a replacement to receive the weights from other workers, once its turn has come."""


class Birth(msgspec.Struct, kw_only=True):
    """How to start a worker: one process per rank."""

    bodies: Sequence[ActorSpec | EngineSpec]
    env: Mapping[str, str]


class Pool(DriverListener):
    """Manages worker processes of one kind, from fork to exit. Use as an async context manager.

    Raises (on entering):
        WorkerStartError: a worker exited, or was not ready in time. No process is left running.
    """

    def __init__(
        self,
        births: Sequence[Birth],
        *,
        name: str,
        preload: str,
        fabric: FabricConfig,
        config: PoolConfig,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._name = name
        """Name of this pool in the warning about a pool that was never closed."""
        self._unclosed: weakref.finalize[..., Any] | None = None
        self._births = dict(enumerate(births))
        self._preload = preload
        self._fabric_config = fabric
        self._config = config
        self._progress = on_progress or (lambda text: None)
        self._workers: dict[int, Worker] = {}
        self._supervision: dict[int, Supervision] = {}
        self._forked: Counter[int] = Counter()
        """Number of forks of each worker."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._entered = self._started = False
        self._closing = False
        self._draining = 0
        """Number of tasks that wait for the last calls."""
        self._processes = Processes(preload, config.start_timeout, self._on_exited)
        self._folder: Path | None = None
        self._worker_keys: ClientKeys | None = None
        self._driver: Driver | None = None
        self._monitor: HangMonitor | None = None
        self.outer_address = ""
        """Address at which other processes can reach the driver."""
        self.weights = WeightChannel(self.expel, self._is_up)

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise Closed("the pool has not been started; use 'async with'")
        return self._driver

    @property
    def workers(self) -> list[WorkerInfo]:
        found = []
        closed = self.driver.fabric.closed
        # Iterate over a copy: other threads may read this property.
        for worker in list(self._workers.values()):
            member = self.driver.fabric.members[worker.index]
            ready = worker.ready.result() if worker.is_ready else None
            found.append(
                WorkerInfo(
                    id=worker.index,
                    pid=ready.pid if ready else worker.pids.get(0, 0),
                    state=RETIRED if closed else member.state,
                    weight_version=self.weights.versions.get(worker.index, 0),
                    device=ready.device if ready else "",
                    load=member.load,
                    window=member.window,
                )
            )
        return found

    @property
    def queue(self) -> QueueInfo:
        queue = self.driver.fabric.queue
        return QueueInfo(calls=queue.waiting, bytes=queue.queued_bytes, clients=queue.clients)

    def ready(self, index: int) -> Ready:
        """Return the ``Ready`` message of worker ``index``."""
        return self._workers[index].ready.result()

    def _enter_once(self) -> None:
        if self._entered:
            raise UsageError("this has been started before; make another one with launch or spawn")
        self._entered = True

    def _opened(self) -> None:
        """Warn from now on if the pool is never closed."""
        self._unclosed = warn_unless_closed(self, self._name)

    def _closed(self) -> None:
        if self._unclosed is not None:
            self._unclosed.detach()

    def warn_unclosed(self) -> None:
        """Warn unless the pool is closed."""
        if self._unclosed is not None:
            self._unclosed()

    def check_open(self) -> None:
        """Raise ``Closed`` if the pool has not been started or was closed."""
        self.driver.fabric.check_open()

    async def __aenter__(self) -> Self:
        self._enter_once()
        self._opened()
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await self._start()
        except TimeoutError:
            waiting = [w for w in self._workers.values() if not w.is_ready]
            serve = len(self._workers) - len(waiting)
            lost = self._processes.lost
            await self.close()
            raise WorkerStartError(
                f"{len(self._births) - serve} of {len(self._births)} workers were not ready within "
                f"{self._config.start_timeout:g} s (start_timeout){'; ' if lost else ''}{lost}",
                worker=waiting[0].index if waiting else -1,
                output=tail(waiting[0].log) if waiting else "",
            ) from None
        except BaseException:
            await self.close()
            raise
        self._started = True
        for worker in self._workers.values():
            worker.returns = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _start(self) -> None:
        config = self._config
        raise_file_limit()
        self._folder = self._processes.start()
        address = config.address
        if address == "ipc":
            address = f"ipc://{self._folder}/router.sock"
        elif address == "tcp":
            address = "tcp://127.0.0.1:*"
        router = ZmqRouter(
            address,
            max_message_bytes=config.max_message_bytes,
            keys=None if config.keys is None else read_driver_keys(config.keys),
            insecure=config.insecure,
            heartbeat_timeout=config.heartbeat_timeout,
        )
        self._worker_keys = router.worker_keys
        self._driver = driver = Driver(router, self._fabric_config, config.max_message_bytes)
        driver.add_listener(self)
        self.outer_address = router.outer_address
        self.weights.attach(driver, router.outer_address)
        self.weights.on_updated = self._sync_stale
        self._monitor = HangMonitor(driver, config.hang_timeout, self._dump, self.expel)
        driver.start()
        if self._preload != "plain":
            self._progress("importing SGLang (once per program)")
        await self._processes.connect()
        for index in self._births:
            self._fork(index)
        await self._all_ready()

    def _fork(self, index: int) -> Worker:
        assert self._folder is not None
        birth = self._births[index]
        address = self.driver.transport.address
        identity = f"{index}-{secrets.token_hex(8)}".encode()
        worker = Worker(index, identity, self._folder)
        assert self._monitor is not None
        specs = []
        for body in birth.bodies:
            if isinstance(body, EngineSpec):
                body = msgspec.structs.replace(
                    body, rendezvous=str(worker.rendezvous), args=self._engine_args(body, index)
                )
            specs.append(
                WorkerSpec(
                    index=index,
                    identity=identity,
                    address=address,
                    max_message_bytes=self._config.max_message_bytes,
                    keys=self._worker_keys,
                    body=body,
                    heartbeat_interval=self._monitor.heartbeat_interval,
                    heartbeat_timeout=self._config.heartbeat_timeout,
                )
            )
        self._forked[index] += 1
        requests = self._processes.requests(worker, specs, birth.env)
        self._supervision.setdefault(
            index, Supervision(self._config.restarts, self._config.restart_period)
        )
        self.driver.add_worker(index, identity)
        self._workers[index] = worker
        self._monitor.watch(index, identity)
        for rank, body in enumerate(birth.bodies):
            if isinstance(body, EngineSpec) and body.engine == "sglang":
                self.weights.add_rank(index, rank, rank_identity(identity, rank))
        self._processes.fork(worker, requests)
        return worker

    def _engine_args(self, body: EngineSpec, index: int) -> dict[str, object]:
        """Return the engine's arguments. Replace ``random_seed``, if set, by a seed per process."""
        seed = body.args.get("random_seed")
        if not isinstance(seed, int):
            return body.args
        return {**body.args, "random_seed": process_seed(seed, index, self._forked[index])}

    async def _all_ready(self) -> None:
        """Wait until all workers are ready. Raise the error of the first worker that fails."""
        total = len(self._workers)
        pending: set[asyncio.Future[Ready]] = {w.ready for w in self._workers.values()}
        while pending:
            self._progress(f"starting workers ({total - len(pending)} of {total} ready)")
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """End all calls with ``Closed`` and shut down all workers.

        Workers that do not exit within ``shutdown_timeout`` are killed with SIGKILL.

        Args:
            drain: first wait at most ``timeout`` seconds until the pending calls have ended. New
                calls are refused with ``Closed``.
        """
        if self._closing:
            return
        if self._driver is not None:
            if self._driver.is_copied:
                return
            self._driver.check_loop()
        if drain and self._started:
            await self._drain(timeout)
            if self._closing:
                return
        self._closing = True
        if self._monitor is not None:
            self._monitor.close()
        try:
            await self.weights.close()
            for task in self._tasks:
                task.cancel()
            if self._driver is not None:
                self._driver.close()
                for worker in self._workers.values():
                    if worker.running and worker.is_ready and not worker.lost:
                        self._driver.shut_down_worker(worker.index)
                    else:
                        self._processes.kill(worker)
            await self._end([w for w in self._workers.values() if w.running])
        finally:
            # Do this also after a cancellation: the fork server kills the remaining processes.
            if self._driver is not None:
                self._driver.transport.close()
            self._processes.close()
            self._closed()
            for worker in self._workers.values():
                if not worker.ready.done():
                    worker.ready.set_exception(Closed("the pool was closed"))
                # Avoid asyncio's warning when no task awaits the future.
                worker.ready.exception()
                for event in (worker.drained, worker.settled, worker.gone):
                    event.set()

    async def _drain(self, timeout: float | None) -> None:
        """Refuse new calls and wait until no call is left. A cancellation undoes the refusal."""
        fabric = self.driver.fabric
        self._draining += 1
        fabric.refusing = True
        try:
            async with asyncio.timeout(timeout):
                while fabric.calls:
                    await self.driver.idle()
        except TimeoutError:
            pass
        except BaseException:
            self._draining -= 1
            fabric.refusing = self._draining > 0
            raise

    async def _end(self, workers: Sequence[Worker]) -> None:
        """Wait until all processes of the workers have exited. Kill them after a timeout."""
        try:
            async with asyncio.timeout(self._config.shutdown_timeout):
                for worker in workers:
                    await worker.gone.wait()
        except TimeoutError:
            left = [worker.index for worker in workers if worker.running]
            logger.warning(
                "workers %s did not end within %.0f s, and are killed",
                left,
                self._config.shutdown_timeout,
            )
            for worker in workers:
                self._processes.kill(worker)
            try:
                async with asyncio.timeout(self._config.shutdown_timeout):
                    for worker in workers:
                        await worker.gone.wait()
            except TimeoutError:
                # The kernel may need long, to free a GPU for example. The fork server waits for
                # these processes.
                left = [worker.index for worker in workers if worker.running]
                logger.warning("killed, and not gone yet: the processes of workers %s", left)

    async def full(self, timeout: float | None) -> None:
        """Wait until every worker that was not removed or retired accepts calls.

        Raises:
            DeadlineExceeded: some workers do not accept calls within ``timeout`` seconds. The
                message names them.
            WorkerLost: every worker is removed or retired.
        """
        self.driver.check_loop()
        check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self.check_open()
                    states = {m.index: m.state for m in self.driver.fabric.members.values()}
                    wanted = {i: s for i, s in states.items() if s not in (DRAINING, RETIRED)}
                    if not wanted:
                        raise WorkerLost("no worker is left in this pool")
                    if all(state is READY for state in wanted.values()):
                        return
                    await self.driver.change()
        except TimeoutError:
            waiting = ", ".join(f"{i} is {s}" for i, s in wanted.items() if s is not READY)
            raise DeadlineExceeded(
                f"not every worker serves after {timeout:g} s: {waiting}"
            ) from None

    @property
    def births(self) -> list[Birth]:
        """The births of the workers that are not retired."""
        members = self.driver.fabric.members
        return [b for i, b in self._births.items() if members[i].state is not RETIRED]

    async def add(self, births: Sequence[Birth]) -> list[int]:
        """Start more workers and wait until they accept calls.

        If no worker has the current weights any more, the new workers are "stale". They accept
        calls after the next update, and this method returns without waiting for it.

        Returns:
            The indices of the new workers.

        Raises:
            Closed: the pool was closed meanwhile.
            WorkerStartError: a new worker exited before it was ready, or was not ready in time. All
                new workers are then killed.
        """
        self.check_open()
        self.driver.check_loop()
        try:
            await self._processes.connect()
        except TimeoutError:
            raise WorkerStartError(
                f"the fork server was not ready within {self._config.start_timeout:g} s "
                "(start_timeout)"
            ) from None
        self.check_open()
        first = max(self._births) + 1
        indices = list(range(first, first + len(births)))
        workers = []
        try:
            for index, birth in zip(indices, births, strict=True):
                self._births[index] = birth
                try:
                    workers.append(self._fork(index))
                except BaseException:
                    del self._births[index]
                    raise
            async with asyncio.timeout(self._config.start_timeout):
                for worker in workers:
                    await asyncio.shield(worker.ready)
                for worker in workers:
                    await worker.settled.wait()
                    self.check_open()
                    if worker.lost:
                        raise WorkerStartError(
                            f"worker {worker.index} was lost before it served"
                            f"{': ' if worker.exit_reason else ''}{worker.exit_reason}",
                            worker=worker.index,
                            output=tail(worker.log),
                        )
        except BaseException as error:
            for worker in workers:
                self.expel(worker.index, "it is not wanted any more")
            if isinstance(error, TimeoutError):
                raise WorkerStartError(
                    f"the new workers were not ready within {self._config.start_timeout:g} s "
                    "(start_timeout)"
                ) from None
            raise
        for worker in workers:
            worker.returns = True
        return indices

    async def remove(self, index: int, timeout: float | None) -> None:
        """Let a worker finish its calls, then shut it down.

        Calls that are not finished after ``timeout`` seconds continue on other workers, as after
        the loss of a worker. The removal continues when the caller is cancelled.

        Raises:
            Closed: the pool was closed meanwhile.
            UsageError: the worker does not exist, is already being removed or retired, or is the
                last worker.
        """
        self.check_open()
        self.driver.check_loop()
        check_timeout(timeout)
        check_target(0, index, None)
        member = self.driver.fabric.members.get(index)
        if member is None or member.state in (DRAINING, RETIRED):
            what = "there is no" if member is None else f"already {member.state}:"
            raise UsageError(f"{what} worker {index}")
        others = [m for m in self.driver.fabric.members.values() if m is not member]
        if all(m.state in (DRAINING, RETIRED) for m in others):
            raise UsageError(f"worker {index} is the last one; close the pool instead")
        worker = self._workers[index]
        worker.returns = False
        worker.restart_in = None
        serves = member.state is READY
        if serves:
            self.driver.drain(index)
        else:
            self._dismiss(worker)
        removal = self._run(self._remove(worker, serves, timeout))
        try:
            await asyncio.shield(removal)
        except asyncio.CancelledError:
            if removal.cancelled():
                raise Closed("the pool was closed") from None
            raise

    async def _remove(self, worker: Worker, serves: bool, timeout: float | None) -> None:
        """Shut down a worker that gets no more calls, after its calls or after ``timeout``."""
        if serves:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await worker.drained.wait()
            self._dismiss(worker)
        if worker.running:
            await self._end([worker])

    def _dismiss(self, worker: Worker) -> None:
        if not worker.lost:
            self.driver.shut_down_worker(worker.index)
            self.driver.worker_lost(worker.index, "it was removed")
            worker.lost = True
        else:
            self.driver.worker_retired(worker.index, "it was removed")

    def expel(self, index: int, reason: str) -> None:
        """Kill a worker. Its calls continue on other workers, as after the loss of a worker."""
        worker = self._workers[index]
        if self._closing or not worker.running or worker.lost:
            return
        logger.error("worker %d is ended: %s", index, reason)
        worker.exit_reason = reason
        self._processes.kill(worker)
        self._lost(worker, reason)

    # --- replacement of lost workers --------------------------------------------------------------

    def _lost(self, worker: Worker, reason: str) -> None:
        """Move the calls of a lost worker to other workers and decide whether to replace it.

        A replacement starts when all processes of the worker have exited.
        """
        if worker.lost:
            return
        worker.lost = True
        worker.drained.set()
        worker.settled.set()
        index = worker.index
        if worker.returns:
            supervision = self._supervision[index]
            served = self.driver.fabric.members[index].served > 0
            worker.restart_in = supervision.lost(reason, time.monotonic(), served=served)
            if worker.restart_in is None:
                reason = f"{reason} ({supervision.history}; {supervision.used_up})"
                logger.error("worker %d is retired: %s", index, reason)
        self.driver.worker_lost(index, reason, returns=worker.restart_in is not None)

    def _ended(self, worker: Worker) -> None:
        """Start the replacement, if any. All processes have exited and freed their resources."""
        worker.gone.set()
        if worker.restart_in is not None:
            self._run(self._replace(worker))

    async def _replace(self, worker: Worker) -> None:
        index = worker.index
        try:
            while True:
                await asyncio.sleep(worker.restart_in or 0.0)
                if worker.restart_in is None:
                    # The worker was removed meanwhile.
                    return
                try:
                    await self._processes.connect()
                    break
                except (WorkerStartError, TimeoutError) as error:
                    if worker.restart_in is not None:
                        self._not_replaced(worker, error)
            if worker.restart_in is None:
                return
            replacement = self._fork(index)
            replacement.returns = True
        except Exception as error:
            logger.error("worker %d cannot be replaced: %s", index, error)
            self.driver.worker_retired(index, f"no replacement could be started: {error}")
            return
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await asyncio.shield(replacement.ready)
        except TimeoutError:
            self.expel(
                index, f"it was not ready within {self._config.start_timeout:g} s (start_timeout)"
            )
        except WorkerStartError as error:
            logger.error("the replacement of worker %d failed: %s\n%s", index, error, error.output)

    def _not_replaced(self, worker: Worker, error: WorkerStartError | TimeoutError) -> None:
        """Record that no fork server could start a replacement, and schedule another attempt.

        Raises:
            WorkerStartError: the worker's budget of restarts is used up.
        """
        if isinstance(error, WorkerStartError):
            reason, output = error.message, error.output
        else:
            reason = (
                f"the fork server was not ready within {self._config.start_timeout:g} s "
                "(start_timeout)"
            )
            output = ""
        logger.error("worker %d could not be replaced: %s\n%s", worker.index, reason, output)
        supervision = self._supervision[worker.index]
        worker.restart_in = supervision.lost(reason, time.monotonic(), served=False)
        if worker.restart_in is None:
            raise WorkerStartError(f"{supervision.history}; {supervision.used_up}")

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- weights ----------------------------------------------------------------------------------

    def _is_up(self, index: int) -> bool:
        return self.driver.fabric.members[index].state in (SYNCING, STALE, READY, DRAINING)

    def _sync_stale(self) -> None:
        """Send the current weights to stale workers, now that a worker has them."""
        for worker in list(self._workers.values()):
            if self.driver.fabric.members[worker.index].state is STALE:
                self.driver.set_syncing(worker.index, stale=False)
                self._run(self._sync(worker))

    async def _sync(self, worker: Worker) -> None:
        """Send a running worker the current weights, then let it accept calls."""
        index = worker.index

        def serve() -> None:
            if not worker.lost:
                self.driver.serve(index)

        try:
            synced = await self.weights.sync(index, SYNC_TIMEOUT, serve)
        except Exception as error:
            if not worker.lost:
                self.expel(index, f"it could not get the current weights: {error}")
            return
        if worker.lost:
            return
        if synced:
            self._sync_stale()
        else:
            logger.warning(
                "worker %d is up, but no other worker holds the current weights (version %d); it "
                "serves after the next update",
                index,
                self.weights.version,
            )
            self.driver.set_syncing(index, stale=True)
        worker.settled.set()

    # --- events -----------------------------------------------------------------------------------

    def on_starting(self, worker: int, stage: str) -> None:
        logger.debug("worker %d: %s", worker, stage)
        if not self._closing:
            self._progress(f"worker {worker}: {stage}")

    def on_unusable(self, worker: int, reason: str) -> None:
        self.expel(worker, reason)

    def on_drained(self, worker: int) -> None:
        self._workers[worker].drained.set()

    def on_ready(self, worker: int, ready: Ready) -> None:
        started = self._workers[worker]
        if started.ready.done():
            return
        logger.debug("worker %d is ready (pid %d, %s)", worker, ready.pid, ready.device)
        started.ready.set_result(ready)
        if self.driver.fabric.members[worker].state is SYNCING:
            self._run(self._sync(started))
        else:
            started.settled.set()

    def _on_exited(self, worker: Worker, status: int) -> None:
        index = worker.index
        if self._closing:
            if not worker.running:
                worker.gone.set()
            return
        reason = (
            worker.exit_reason
            or self._processes.lost
            or (f"killed by signal {-status}" if status < 0 else f"exited with status {status}")
        )
        if not worker.ready.done():
            worker.ready.set_exception(
                WorkerStartError(
                    f"worker {index} ended before it was ready: {reason}",
                    worker=index,
                    output=tail(worker.log),
                )
            )
            # Avoid asyncio's warning when no task awaits the future.
            worker.ready.exception()
        elif not worker.lost:
            output = tail(worker.log, 20)
            said = f"; its last output:\n{output}" if output else ""
            level = logging.DEBUG if self._processes.leaving else logging.ERROR
            logger.log(level, "worker %d was lost: %s%s", index, reason, said)
        if self._processes.leaving:
            worker.returns = False
        self._lost(worker, reason)
        if worker.running:
            # One rank has exited: the other ranks cannot continue without it.
            self._processes.kill(worker)
        else:
            self._ended(worker)

    def _dump(self, index: int) -> tuple[Path, int]:
        """Ask a worker's processes to write their stacks to the worker's log.

        Returns:
            The log, and its size in bytes before.
        """
        worker = self._workers[index]
        before = 0
        with contextlib.suppress(OSError):
            before = worker.log.stat().st_size
        self._processes.dump(worker)
        return worker.log, before
