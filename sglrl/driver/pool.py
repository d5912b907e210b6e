"""The pool of one ``launch`` or ``spawn``: enter, close, and add or remove workers.

``supervisor.py`` starts and replaces the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from ..config import FabricConfig, PoolConfig, check_timeout
from ..core.members import DRAINING, READY, RETIRED, STALE, SYNCING
from ..errors import Closed, DeadlineExceeded, UsageError, WorkerLost, WorkerStartError
from ..transport.addresses import host_of
from ..transport.curve_keys import read_driver_keys
from ..transport.system_limits import raise_file_limit
from ..transport.zmq import ZmqRouter
from ..weights.channel import WeightChannel
from ..wire.calls import Load, Ready
from ..wire.engine import EngineInfo
from ..wire.processes import ClientKeys, PoolEntry
from .driver import Driver
from .fork_server import tail
from .launcher import Launcher, LaunchSpec
from .lifetime import Lifetime
from .supervisor import Supervisor
from .worker_ending import WorkerEnding
from .worker_info import HostInfo, QueueInfo, WorkerHistory, WorkerInfo
from .worker_processes import Processes, Worker


class StartProgress:
    """Receives the stages of a start, inside ``with progress:``. A subclass shows them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def show(self, text: str) -> None:
        """Show a stage. For a replacement, this is called outside of ``with progress:``."""


class Pool:
    """Worker processes of one kind, and the driver that sends them calls.

    Args:
        launch_specs: the launch specs of the workers that the pool starts with.
        more: ``more(n, present)`` returns the launch specs of ``n`` further workers. ``present``
            are the launch specs of the present workers.
        name: the name of the pool, for the warning that it was never closed.
        launcher: starts the processes of the workers.
        fabric: the options of the calls' queue and routing.
        config: the options of the pool.
        progress: shows the stages of the start.
    """

    def __init__(
        self,
        launch_specs: Sequence[LaunchSpec],
        *,
        more: Callable[[int, list[LaunchSpec]], list[LaunchSpec]],
        name: str,
        launcher: Launcher,
        fabric: FabricConfig,
        config: PoolConfig,
        progress: StartProgress | None = None,
    ) -> None:
        self._lifetime = Lifetime(name)
        self._first = launch_specs
        self._more = more
        self._fabric_config = fabric
        self._config = config
        self._progress = progress or StartProgress()
        self._started = False
        self.engine: EngineInfo | None = None
        self._launcher = launcher
        self._processes = Processes(launcher)
        self._driver: Driver | None = None
        self._worker_keys: ClientKeys | None = None
        self.outer_address = ""
        """The address at which other processes reach the driver."""
        self.weights = WeightChannel(
            self.expel, self._is_up, host=launcher.host, keep=config.keep_weights
        )
        self._supervisor = Supervisor(self._processes, self.weights, config, self._progress.show)
        self.ending = WorkerEnding(
            self._supervisor, self._processes, lambda: self.driver, config.shutdown_timeout
        )
        """Removes, restarts and kills single workers."""
        self.folder = Path()
        """The folder of the pool's files, once it has started. Only this user can read it."""

    @property
    def driver(self) -> Driver:
        if self._driver is None:
            raise Closed("the pool has not been started; use 'async with'")
        return self._driver

    @property
    def is_open(self) -> bool:
        """Whether the pool has started, and is not closed."""
        return self._driver is not None and not self._driver.fabric.closed

    @property
    def workers(self) -> list[WorkerInfo]:
        infos = []
        closed = self.driver.fabric.closed
        # Iterate over a copy: other threads may read this property.
        for worker in list(self._supervisor.workers.values()):
            member = self.driver.fabric.members[worker.index]
            ready = worker.ready.result() if worker.is_ready else None
            infos.append(
                WorkerInfo(
                    id=worker.index,
                    pid=ready.pid if ready else worker.pids.get(0, 0),
                    state=RETIRED if closed else member.state,
                    weight_version=self.weights.versions.of.get(worker.index, 0),
                    device=ready.device if ready else "",
                    load=member.load,
                    window=member.window,
                    host=self._launcher.host(worker.index),
                    kept_bytes=self.weights.kept.sizes.get(worker.index, 0),
                )
            )
        return infos

    @property
    def histories(self) -> list[WorkerHistory]:
        """What has happened to each worker, in the order of ``workers``."""
        fabric, now = self.driver.fabric, time.monotonic()
        return [
            WorkerHistory(
                seconds=now - worker.begun,
                restarts=self._supervisor.restarts(index),
                silence=self._supervisor.monitor.silence(index),
                moved_calls=fabric.moved[index],
                preempted=fabric.members[index].reported.preempted,
            )
            for index, worker in self._supervisor.workers.items()
        ]

    @property
    def hosts(self) -> list[HostInfo]:
        """The other machines on which workers may run."""
        return self._launcher.hosts

    @property
    def queue(self) -> QueueInfo:
        queue = self.driver.fabric.queue
        return QueueInfo(calls=queue.waiting, bytes=queue.queued_bytes, clients=queue.clients)

    def loads(self) -> tuple[list[Load], int]:
        fabric = self.driver.fabric
        return [
            m.reported for m in fabric.members.values() if m.state is READY
        ], fabric.queue.waiting

    def entry(self, token: str) -> PoolEntry:
        """Return the arguments with which other processes of this machine connect to the pool.

        Args:
            token: the secret of the address, which the pool's ``RemoteServer`` checks.
        """
        return PoolEntry(
            address=f"{self.driver.transport.address}#{token}",
            keys=self._worker_keys,
            insecure=self._config.insecure,
            heartbeat_timeout=self._config.heartbeat_timeout,
            max_message_bytes=self.driver.max_message_bytes,
        )

    # --- enter ------------------------------------------------------------------------------------

    async def enter(self) -> None:
        """Start the workers and wait until all are ready.

        Raises:
            WorkerStartError: a worker exited, or was not ready in time. No process is left running.
        """
        self._lifetime.enter()
        self._lifetime.opened(self)
        workers = self._supervisor.workers
        try:
            with self._progress:
                async with asyncio.timeout(self._config.start_timeout):
                    await self._start()
        except TimeoutError:
            waiting = [worker for worker in workers.values() if not worker.is_ready]
            late = len(self._first) - len(workers) + len(waiting)
            why = self._launcher.lost or self._launcher.missing
            output = tail(waiting[0].log) if waiting else ""
            log = self._supervisor.logs.keep(waiting[0].log) if waiting else ""
            await self.close()
            raise WorkerStartError(
                f"{late} of {len(self._first)} workers were not ready within "
                f"{self._config.start_timeout:g} s (start_timeout){': ' if why else ''}{why}",
                worker=waiting[0].index if waiting else -1,
                output=output,
                log=log,
            ) from None
        except BaseException:
            await self.close()
            raise
        self._started = True
        for worker in workers.values():
            worker.returns = True

    async def _start(self) -> None:
        config, supervisor = self._config, self._supervisor
        raise_file_limit()
        supervisor.logs.make_folder()
        self.folder = folder = self._processes.start(supervisor.on_exited)
        router = ZmqRouter(
            _listen_address(config.address, folder),
            max_message_bytes=config.max_message_bytes,
            keys=None if config.keys is None else read_driver_keys(config.keys),
            insecure=config.insecure,
            heartbeat_timeout=config.heartbeat_timeout,
            handover=self._launcher.elsewhere,
        )
        self._worker_keys = router.worker_keys
        self._driver = driver = Driver(
            router,
            self._fabric_config,
            config.max_message_bytes,
            workers_return=self._launcher.elsewhere,
        )
        supervisor.attach(driver, folder, router.worker_keys)
        self.weights.attach(driver, router.outer_address)
        self.outer_address = router.outer_address
        if self._launcher.elsewhere:
            self.weights.workers_return = True
        driver.start()
        if self._launcher.stage:
            self._progress.show(self._launcher.stage)
        await self._launcher.prepare(dict(enumerate(self._first)))
        if self._launcher.elsewhere:
            self.weights.host = self._launcher.driver_ip or host_of(router.outer_address)
        workers = [supervisor.add(launch_spec) for launch_spec in self._first]
        await self._all_ready(workers)
        self.engine = workers[0].ready.result().engine

    async def _all_ready(self, workers: Sequence[Worker]) -> None:
        """Wait until all workers are ready. Raise the error of the first worker that fails."""
        pending: set[asyncio.Future[Ready]] = {worker.ready for worker in workers}
        while pending:
            ready = len(workers) - len(pending)
            self._progress.show(f"starting workers ({ready} of {len(workers)} ready)")
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()

    # --- close ------------------------------------------------------------------------------------

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """End all calls with ``Closed`` and shut down all workers.

        Workers that do not exit within ``shutdown_timeout`` are killed with SIGKILL.

        Args:
            drain: whether to first wait for the pending calls. New calls are refused meanwhile.
            timeout: maximum seconds to wait for the pending calls.
        """
        driver = self._driver
        if not await self._lifetime.begin_closing(
            driver, drain=drain and self._started, timeout=timeout
        ):
            return
        workers = self._supervisor.workers.values()
        try:
            if driver is not None:
                self._supervisor.stop()
            await self.weights.close()
            if driver is not None:
                driver.close()
                for worker in workers:
                    serves = worker.is_ready and not (worker.lost or worker.away)
                    if worker.running and serves:
                        driver.workers.shut_down(worker.index)
                    else:
                        self._processes.kill(worker)
            running = [
                worker
                for worker in workers
                if worker.running and self._launcher.reaches(worker.index)
            ]
            await self._processes.end(running, self._config.shutdown_timeout)
        finally:
            # After a cancellation this also runs, and the launcher kills the remaining processes.
            if driver is not None:
                driver.transport.close()
            self._lifetime.closed()
            for worker in workers:
                worker.fail(Closed("the pool was closed"))
                for event in (worker.drained, worker.settled, worker.gone):
                    event.set()
            await self._launcher.close()

    def closes_at_exit(self) -> None:
        self._lifetime.closes_at_exit()

    def warn_unclosed(self) -> None:
        self._lifetime.warn_unclosed()

    # --- full, add, remove ------------------------------------------------------------------------

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
                    self._check_open()
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

    async def add(self, n: int) -> list[int]:
        """Start ``n`` more workers and wait until they accept calls.

        If no worker has the current weights any more, the new workers are "stale". They accept
        calls after the next update, and this method does not wait for the update.

        Returns:
            The indices of the new workers.

        Raises:
            Closed: the pool was closed while this method waited.
            UsageError: the engines are asleep.
            NotEnoughDevices: there is no place for ``n`` more workers.
            WorkerStartError: a new worker exited before it was ready, or was not ready in time. All
                new workers are then killed.
        """
        self._check_open()
        self.driver.check_loop()
        self._check_awake()
        members = self.driver.fabric.members
        present = [
            launch_spec
            for index, launch_spec in self._supervisor.launch_specs.items()
            if members[index].state is not RETIRED
        ]
        launch_specs = self._more(n, present)
        await self._launcher.prepare(self._supervisor.next_launch_specs(launch_specs))
        self._check_open()
        self._check_awake()
        workers: list[Worker] = []
        try:
            for launch_spec in launch_specs:
                worker = self._supervisor.add(launch_spec)
                workers.append(worker)
            async with asyncio.timeout(self._config.start_timeout):
                for worker in workers:
                    await asyncio.shield(worker.ready)
                for worker in workers:
                    await self._settled(worker)
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
        return [worker.index for worker in workers]

    async def _settled(self, worker: Worker) -> None:
        """Wait until a new worker accepts calls or is stale.

        Raises:
            Closed: the pool was closed before that.
            WorkerStartError: the worker was lost before that.
        """
        await worker.settled.wait()
        self._check_open()
        if worker.lost:
            raise WorkerStartError(
                f"worker {worker.index} was lost before it served"
                f"{': ' if worker.exit_reason else ''}{worker.exit_reason}",
                worker=worker.index,
                output=tail(worker.log),
                log=self._supervisor.logs.keep(worker.log),
            )

    def hold_replacements(self, held: bool) -> None:
        """Set whether replacements of lost workers are held back."""
        self._supervisor.hold_replacements(held)

    def expel(self, index: int, reason: str) -> None:
        """Kill a worker. Its calls continue on other workers, as after the loss of a worker."""
        self._supervisor.expel(index, reason)

    def _check_open(self) -> None:
        """Raise ``Closed`` if the pool has not been started or was closed."""
        self.driver.fabric.check_open()

    def _check_awake(self) -> None:
        if self._supervisor.held:
            raise UsageError("no worker starts while the engines are asleep; call wake first")

    def _is_up(self, index: int) -> bool:
        return self.driver.fabric.members[index].state in (SYNCING, STALE, READY, DRAINING)


def _listen_address(address: str, folder: Path) -> str:
    """Return the address of the driver's socket. With "ipc", the socket is in ``folder``."""
    if address == "ipc":
        return f"ipc://{folder}/router.sock"
    if address == "tcp":
        return "tcp://127.0.0.1:*"
    return address
