"""The processes of a pool's workers, one per rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import SglrlError, UsageError
from ..transport.system_limits import no_file
from ..wire.calls import Ready
from ..wire.processes import Dump, Kill, WorkerSpec
from .launcher import RANKS, Launcher
from .oom_counter import OomCounter

logger = logging.getLogger("sglrl.pool")


class Worker:
    """The processes of one worker (all its ranks) and their state.

    A replacement is another ``Worker`` with the same index.
    """

    def __init__(self, index: int, identity: bytes, folder: Path, log: Path) -> None:
        self.index = index
        self.identity = identity
        self.log = log
        self.begun = time.monotonic()
        self.rendezvous = folder / f"ranks-{identity.decode()}"
        """The file through which the ranks find each other. A port is not used instead, because
        another program could take it after it is chosen and before it is used."""
        self.pids: dict[int, int] = {}
        self.running: set[int] = set()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.drained = asyncio.Event()
        self.settled = asyncio.Event()
        """Set when the worker accepts calls, waits for weights, or is lost."""
        self.exit_reason = ""
        self.lost = False
        self.away = False
        """Whether the connection is broken. The processes may still run and return."""
        self.breaks = 0
        """Number of times that the connection broke."""
        self.returns = False
        """Whether a replacement follows a loss. False for a new worker until ``Pool.enter`` or
        ``Pool.add`` has succeeded."""
        self.restart_in: float | None = None
        self.oom_counter: OomCounter | None = None
        """The kernel's counter of kills at the fork. None if it is unknown."""

    @property
    def is_ready(self) -> bool:
        """Whether the worker has reported that it is ready. It may have exited since."""
        ready = self.ready
        return ready.done() and not ready.cancelled() and ready.exception() is None

    def fail(self, error: SglrlError) -> None:
        """Set the error of ``ready``, unless the worker was ready before."""
        if not self.ready.done():
            self.ready.set_exception(error)
        # Avoid asyncio's warning when no task awaits the future.
        self.ready.exception()


async def _all_gone(workers: Sequence[Worker], timeout: float) -> None:
    async with asyncio.timeout(timeout):
        for worker in workers:
            await worker.gone.wait()


class Processes:
    """The worker processes of one pool.

    Args:
        launcher: starts and kills the processes.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._on_worker_exited: Callable[[Worker, int], None]
        self._workers: dict[int, Worker] = {}

    def start(self, on_exited: Callable[[Worker, int], None]) -> Path:
        """Start the launcher, and return the folder for the pool's files.

        Args:
            on_exited: ``on_exited(worker, status)`` is called when a process of the worker has
                exited. A negative status is the number of a signal.
        """
        self._on_worker_exited = on_exited
        return self.launcher.start(self._on_forked, self._on_exited)

    def requests(
        self, worker: Worker, specs: Sequence[WorkerSpec], env: Mapping[str, str]
    ) -> list[bytes]:
        """Return the encoded ``Fork`` messages that start the worker's processes, one per rank.

        Raises:
            UsageError: a part of a message cannot be encoded.
        """
        try:
            return [
                self.launcher.request(worker.index * RANKS + rank, spec, env, worker.log)
                for rank, spec in enumerate(specs)
            ]
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the specification of a worker cannot be sent: {error}") from None

    def fork(self, worker: Worker, requests: Sequence[bytes]) -> None:
        try:
            # Create the file here, so that the worker does not need a free inode when it opens it.
            worker.log.touch(mode=0o600)
        except OSError as error:
            raise no_file(worker.log.parent, error) from None
        for rank, request in enumerate(requests):
            key = worker.index * RANKS + rank
            self._workers[key] = worker
            worker.running.add(rank)
            self.launcher.fork(key, request)

    async def end(self, workers: Sequence[Worker], timeout: float) -> None:
        """Wait until all processes of the workers have exited. Kill them after ``timeout`` seconds.

        Then wait at most ``timeout`` seconds more.
        """
        try:
            await _all_gone(workers, timeout)
        except TimeoutError:
            logger.warning(
                "workers %s did not end within %.0f s, and are killed",
                [worker.index for worker in workers if worker.running],
                timeout,
            )
            for worker in workers:
                self.kill(worker)
            try:
                await _all_gone(workers, timeout)
            except TimeoutError:
                # The kernel may need more time, for example to free a GPU. The fork server still
                # waits for these processes.
                left = [worker.index for worker in workers if worker.running]
                logger.warning("killed, but not exited yet: the processes of workers %s", left)

    def kill(self, worker: Worker) -> None:
        """Kill the worker's running processes with SIGKILL."""
        self._send(worker, Kill)

    def dump(self, worker: Worker) -> tuple[Path, int]:
        """Ask the worker's processes to write the stacks of their threads to the worker's log.

        Returns:
            The log, and its size in bytes before the stacks are written.
        """
        before = 0
        with contextlib.suppress(OSError):
            before = worker.log.stat().st_size
        self._send(worker, Dump)
        return worker.log, before

    def _send(self, worker: Worker, message: Callable[[int], Kill | Dump]) -> None:
        for rank in worker.running:
            self.launcher.send(message(worker.index * RANKS + rank))

    def _on_forked(self, key: int, pid: int) -> None:
        self._workers[key].pids[key % RANKS] = pid

    def _on_exited(self, key: int, status: int) -> None:
        worker = self._workers[key]
        worker.running.discard(key % RANKS)
        if not worker.running:
            worker.rendezvous.unlink(missing_ok=True)
        self._on_worker_exited(worker, status)
