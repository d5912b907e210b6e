"""Start the workers of a pool, replace lost workers, and send new workers the current weights.

``core.supervision`` decides whether and when a lost worker is replaced. ``worker_processes`` starts
and kills the processes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ..config import PoolConfig
from ..core.driver_listener import DriverListener
from ..core.members import RETIRED, STALE, SYNCING
from ..core.seeds import process_seed
from ..core.supervision import Supervision
from ..errors import WorkerStartError
from ..weights.channel import WeightChannel
from ..wire.calls import Ready
from ..wire.processes import ClientKeys, EngineSpec, WorkerSpec
from ..wire.weights import rank_identity
from .causes import Cause, cause_of_death, last_lines
from .driver import Driver
from .fork_server import tail
from .hang_monitor import HangMonitor
from .launcher import LaunchSpec
from .oom_counter import OomCounter, read_oom_counter
from .worker_logs import WorkerLogs
from .worker_processes import Processes, Worker

logger = logging.getLogger("sglrl.pool")

_LAST_LINES: Final = 5
"""Maximum lines of a lost worker's output in the log entry about the loss."""

_MAX_LINES: Final = 1000
"""Maximum lines of output in which to search for the error that ended a worker."""

_RETURN_SECONDS: Final = 30.0
"""Seconds to wait for the return of a worker whose connection is broken. While its host is not
connected, the wait starts anew."""

SYNC_TIMEOUT = 120.0
"""Maximum seconds in which a new worker receives the weights from other workers. The time in which
the new worker waits for its turn does not count."""


class Supervisor(DriverListener):
    """The workers of one pool, from fork to exit, and their replacements.

    Args:
        processes: starts and kills the processes.
        weights: sends the current weights to new workers.
        config: the options of the pool.
        on_progress: is called with each stage of a worker's start.

    Attributes:
        launch_specs: the launch spec of each worker, by index.
        workers: the latest processes of each worker, by index.
        monitor: kills workers that hang.
    """

    monitor: HangMonitor

    def __init__(
        self,
        processes: Processes,
        weights: WeightChannel,
        config: PoolConfig,
        on_progress: Callable[[str], None],
    ) -> None:
        self.launch_specs: dict[int, LaunchSpec] = {}
        self.workers: dict[int, Worker] = {}
        self._processes = processes
        self._launcher = processes.launcher
        self._weights = weights
        self._config = config
        self._progress = on_progress
        self._supervision: dict[int, Supervision] = {}
        self._forked: Counter[int] = Counter()
        """Number of processes that each worker has had."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._may_start = asyncio.Event()
        self._may_start.set()
        self.logs = WorkerLogs(config.log_dir)
        self._driver: Driver
        self._folder: Path
        self._keys: ClientKeys | None = None

    def attach(self, driver: Driver, folder: Path, keys: ClientKeys | None) -> None:
        """Connect new workers to ``driver`` from now on.

        Args:
            driver: the driver of the pool.
            folder: the pool's folder, for the files of the workers.
            keys: the keys for the connections of the workers.
        """
        self._driver = driver
        self._folder = folder
        self._keys = keys
        driver.add_listener(self)
        self._weights.versions.on_updated = self._sync_stale
        self.monitor = HangMonitor(driver, self._config.hang_timeout, self.dump, self.expel)

    def stop(self) -> None:
        """Start no more replacements, and cancel all tasks. The pool shuts down the workers."""
        self._stopped = True
        self.monitor.close()
        for task in self._tasks:
            task.cancel()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in a task, which ``stop`` cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- start ------------------------------------------------------------------------------------

    def next_launch_specs(self, launch_specs: Sequence[LaunchSpec]) -> dict[int, LaunchSpec]:
        """Return the launch specs by the indices that ``add`` will give to the workers."""
        return dict(enumerate(launch_specs, len(self.launch_specs)))

    def add(self, launch_spec: LaunchSpec) -> Worker:
        """Fork a worker with the next index."""
        index = len(self.launch_specs)
        self.launch_specs[index] = launch_spec
        try:
            return self._fork(index)
        except BaseException:
            del self.launch_specs[index]
            raise

    def restarts(self, index: int) -> int:
        """Return how often a worker was replaced."""
        return max(0, self._forked[index] - 1)

    def _fork(self, index: int) -> Worker:
        launch_spec = self.launch_specs[index]
        identity = f"{index}-{secrets.token_hex(8)}".encode()
        log = self.logs.path(self._folder, index, self._forked[index])
        worker = Worker(index, identity, self._folder, log)
        worker.oom_counter = self._oom_counter()
        specs = self._specs(worker, launch_spec)
        self._forked[index] += 1
        requests = self._processes.requests(worker, specs, launch_spec.env)
        self._supervision.setdefault(
            index, Supervision(self._config.restarts, self._config.restart_period)
        )
        self._driver.workers.add(index, identity)
        self.workers[index] = worker
        self.monitor.watch(index, identity)
        for rank, body in enumerate(launch_spec.bodies):
            if isinstance(body, EngineSpec):
                self._weights.add_rank(index, rank, rank_identity(identity, rank))
        self._processes.fork(worker, requests)
        return worker

    def _specs(self, worker: Worker, launch_spec: LaunchSpec) -> list[WorkerSpec]:
        """Return the spec of each rank."""
        specs = []
        for body in launch_spec.bodies:
            if isinstance(body, EngineSpec):
                body = msgspec.structs.replace(
                    body,
                    rendezvous=str(worker.rendezvous),
                    args=self._engine_args(body, worker.index),
                )
            specs.append(
                WorkerSpec(
                    index=worker.index,
                    identity=worker.identity,
                    address=self._driver.transport.address,
                    max_message_bytes=self._config.max_message_bytes,
                    keys=self._keys,
                    body=body,
                    heartbeat_interval=self.monitor.heartbeat_interval,
                    heartbeat_timeout=self._config.heartbeat_timeout,
                    returns=self._launcher.elsewhere,
                )
            )
        return specs

    def _engine_args(self, body: EngineSpec, index: int) -> dict[str, object]:
        """Return the engine's arguments. If ``random_seed`` is set, each process gets its own."""
        seed = body.args.get("random_seed")
        if not isinstance(seed, int):
            return body.args
        return {**body.args, "random_seed": process_seed(seed, index, self._forked[index])}

    # --- end --------------------------------------------------------------------------------------

    def expel(self, index: int, reason: str) -> None:
        """Kill a worker. Its calls continue on other workers, as after the loss of a worker."""
        worker = self.workers[index]
        if self._stopped or not worker.running or worker.lost:
            return
        logger.error("worker %d is ended: %s", index, reason)
        worker.exit_reason = reason
        self._processes.kill(worker)
        self._lost(worker, reason)

    def dismiss(self, worker: Worker) -> None:
        """Shut down a worker that was removed. If it is lost, cancel its replacement instead."""
        if not worker.lost:
            self._driver.workers.shut_down(worker.index)
            self._driver.workers.lost(worker.index, "it was removed")
            worker.lost = True
        else:
            self._driver.workers.retired(worker.index, "it was removed")

    def on_exited(self, worker: Worker, status: int) -> None:
        """Handle the exit of one process of a worker. ``Processes`` calls this."""
        index = worker.index
        if self._stopped:
            if not worker.running:
                worker.gone.set()
            return
        output = tail(worker.log, _MAX_LINES)
        cause = self._cause(worker, status, output)
        host = self._launcher.host(index)
        where = f" on host {host}" if self._launcher.elsewhere and host else ""
        if not worker.ready.done():
            worker.fail(
                WorkerStartError(
                    f"worker {index}{where} ended before it was ready: {cause}",
                    worker=index,
                    output=tail(worker.log),
                    log=self.logs.keep(worker.log),
                )
            )
        elif not worker.lost or (worker.exit_reason and status not in (0, -signal.SIGKILL)):
            entry = [f"worker {index}{where} was lost: {cause}"]
            if log := self.logs.keep(worker.log):
                entry += [*last_lines(status, output, _LAST_LINES), f"(the whole log: {log})"]
            level = logging.DEBUG if self._launcher.leaving else logging.ERROR
            logger.log(level, "%s", "\n  ".join(entry))
        if self._launcher.leaving:
            worker.returns = False
        self._lost(worker, cause.reason, cause.detail)
        if worker.running:
            # One rank has exited: the other ranks cannot continue without it.
            self._processes.kill(worker)
        else:
            self._ended(worker)

    def _cause(self, worker: Worker, status: int, output: str) -> Cause:
        """Return why a process of a worker exited."""
        cause = cause_of_death(status, output, worker.oom_counter, self._oom_counter())
        known = worker.exit_reason or self._launcher.lost
        if known:
            return Cause(known, "" if status == -signal.SIGKILL else str(cause))
        return cause

    def _oom_counter(self) -> OomCounter | None:
        """Return the kernel's counter of kills, or None if the workers are on other machines."""
        return None if self._launcher.elsewhere else read_oom_counter()

    def _lost(self, worker: Worker, reason: str, detail: str = "") -> None:
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
            served = self._driver.fabric.members[index].served > 0
            worker.restart_in = supervision.lost(
                reason, time.monotonic(), served=served, detail=detail
            )
            if worker.restart_in is None:
                reason = f"{reason} ({supervision.history}; {supervision.used_up})"
                logger.error("worker %d is retired: %s", index, reason)
                detail = ""
        reason = str(Cause(reason, detail))
        self._driver.workers.lost(index, reason, returns=worker.restart_in is not None)

    # --- replacements -----------------------------------------------------------------------------

    def _ended(self, worker: Worker) -> None:
        """Start the replacement, if any, now that all processes of the worker have exited."""
        worker.gone.set()
        if worker.restart_in is not None:
            self.run(self._replace(worker))
        else:
            self._launcher.release(worker.index)

    @property
    def held(self) -> bool:
        """Whether replacements are held back."""
        return not self._may_start.is_set()

    def hold_replacements(self, held: bool) -> None:
        """Set whether replacements are held back."""
        if held:
            self._may_start.clear()
        else:
            self._may_start.set()

    async def _replace(self, worker: Worker) -> None:
        index = worker.index
        try:
            if not await self._may_fork(worker):
                return
            replacement = self._fork(index)
            replacement.returns = True
        except Exception as error:
            logger.error("worker %d cannot be replaced: %s", index, error)
            self._driver.workers.retired(index, f"no replacement could be started: {error}")
            return
        try:
            async with asyncio.timeout(self._config.start_timeout):
                await asyncio.shield(replacement.ready)
        except TimeoutError:
            self.expel(
                index, f"it was not ready within {self._config.start_timeout:g} s (start_timeout)"
            )
        except WorkerStartError as error:
            logger.error("the replacement of worker %d failed: %s", index, error)

    async def _may_fork(self, worker: Worker) -> bool:
        """Wait until the replacement of a lost worker may start and the launcher is prepared.

        Returns:
            False if the worker was removed in the meantime.

        Raises:
            WorkerStartError: the worker's budget of restarts is used up.
        """
        while worker.restart_in is not None:
            await asyncio.sleep(worker.restart_in)
            await self._may_start.wait()
            if worker.restart_in is None:
                return False
            try:
                await self._launcher.prepare({worker.index: self.launch_specs[worker.index]})
            except WorkerStartError as error:
                if worker.restart_in is not None:
                    self._not_replaced(worker, error)
            else:
                if not self.held:
                    return worker.restart_in is not None
        return False

    def _not_replaced(self, worker: Worker, error: WorkerStartError) -> None:
        """Record that the launcher could not start a replacement, and schedule another attempt.

        Raises:
            WorkerStartError: the worker's budget of restarts is used up.
        """
        logger.error(
            "worker %d could not be replaced: %s\n%s", worker.index, error.message, error.output
        )
        supervision = self._supervision[worker.index]
        worker.restart_in = supervision.lost(error.message, time.monotonic(), served=False)
        if worker.restart_in is None:
            raise WorkerStartError(f"{supervision.history}; {supervision.used_up}")

    # --- weights ----------------------------------------------------------------------------------

    def _sync_stale(self) -> None:
        """Let workers with the current weights serve. Send the weights to other stale workers."""
        self._driver.hold("stale", None)
        for worker in list(self.workers.values()):
            state = self._driver.fabric.members[worker.index].state
            if state in (STALE, SYNCING) and self._weights.versions.is_current(worker.index):
                self._driver.workers.serve(worker.index)
                worker.settled.set()
            elif state is STALE:
                self._driver.workers.set_syncing(worker.index, stale=False)
                self.run(self._sync(worker))

    async def _sync(self, worker: Worker) -> None:
        """Send the current weights to a running worker, then let it accept calls."""
        index, breaks = worker.index, worker.breaks

        def is_gone() -> bool:
            return worker.lost or worker.breaks > breaks

        def serve() -> None:
            if not is_gone() and self._driver.fabric.members[index].state is SYNCING:
                self._driver.workers.serve(index)

        try:
            synced = await self._weights.sync(index, SYNC_TIMEOUT, serve)
        except Exception as error:
            if not is_gone():
                self.expel(index, f"it could not get the current weights: {error}")
            return
        if is_gone():
            return
        if synced:
            self._sync_stale()
        else:
            logger.warning(
                "worker %d is up, but no other worker holds the current weights (version %d); it "
                "serves after the next update",
                index,
                self._weights.version,
            )
            self._driver.workers.set_syncing(index, stale=True)
            self._hold_stale()
        worker.settled.set()

    def _hold_stale(self) -> None:
        """If all workers are stale, record that calls wait for the next weight update."""
        states = {member.state for member in self._driver.fabric.members.values()} - {RETIRED}
        if states == {STALE}:
            version = self._weights.version
            reason = f"no process has the weights of version {version} any more"
            self._driver.hold("stale", f"{reason}; await client.update_weights(...) with all")

    # --- events -----------------------------------------------------------------------------------

    def on_starting(self, worker: int, stage: str) -> None:
        logger.debug("worker %d: %s", worker, stage)
        if not self._stopped:
            self._progress(f"worker {worker}: {stage}")

    def on_unusable(self, worker: int, reason: str) -> None:
        self.expel(worker, reason)

    def on_drained(self, worker: int) -> None:
        self.workers[worker].drained.set()

    def on_ready(self, worker: int, ready: Ready) -> None:
        started = self.workers[worker]
        if started.away:
            started.away = False
            logger.info("worker %d is back", worker)
        elif started.ready.done():
            return
        else:
            logger.debug("worker %d is ready (pid %d, %s)", worker, ready.pid, ready.device)
            started.ready.set_result(ready)
        if self._driver.fabric.members[worker].state is SYNCING:
            self.run(self._sync(started))
        else:
            started.settled.set()

    def on_away(self, worker: int) -> None:
        gone = self.workers[worker]
        gone.away = True
        gone.breaks += 1
        logger.warning(
            "the connection to worker %d on host %s is broken", worker, self._launcher.host(worker)
        )
        self._expect_return(gone, gone.breaks)

    def _expect_return(self, worker: Worker, breaks: int) -> None:
        """Kill a worker that does not return in time. While its host is not connected, wait longer.

        The launcher ends the workers of a host that does not return.
        """

        def check() -> None:
            if self._stopped or worker.lost or not worker.away or worker.breaks != breaks:
                return
            if self._launcher.reaches(worker.index):
                self.expel(worker.index, f"it did not connect again within {_RETURN_SECONDS:g} s")
            else:
                self._expect_return(worker, breaks)

        asyncio.get_running_loop().call_later(_RETURN_SECONDS, check)

    def dump(self, index: int) -> tuple[Path, int]:
        """Ask the processes of a worker to write their stacks; see ``Processes.dump``."""
        return self._processes.dump(self.workers[index])
