"""Start and kill the processes of a pool's workers, one per rank, through the fork server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ..config import is_text
from ..errors import SglrlError, UsageError, WorkerStartError
from ..system_limits import no_file
from ..wire.calls import Ready
from ..wire.codec import encode
from ..wire.processes import ActorSpec, Dump, EngineSpec, Fork, Kill, WorkerSpec
from .fork_server import LAST_SECONDS, ForkConnection, ForkServer, fork_server

logger = logging.getLogger("sglrl.pool")

_RANKS = 1024


class Birth(msgspec.Struct, kw_only=True):
    """How to start a worker: one process per rank."""

    bodies: Sequence[ActorSpec | EngineSpec]
    env: Mapping[str, str]


class Worker:
    """The processes of one worker (all its ranks) and their state.

    A replacement is another ``Worker`` with the same index.
    """

    def __init__(self, index: int, identity: bytes, folder: Path, log: Path) -> None:
        self.index = index
        self.identity = identity
        self.log = log
        self.rendezvous = folder / f"ranks-{identity.decode()}"
        """File through which the ranks find each other. Another program could take a port after it
        is chosen and before it is used."""
        self.pids: dict[int, int] = {}
        self.running: set[int] = set()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.drained = asyncio.Event()
        self.settled = asyncio.Event()
        """Set when the worker accepts calls, waits for weights, or is lost."""
        self.exit_reason = ""
        self.lost = False
        self.returns = False
        """Whether a replacement follows a loss. False until the worker has started successfully."""
        self.restart_in: float | None = None

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


def _remove(folder: Path, pid: int) -> None:
    """Remove the folder of a pool that was garbage-collected without being closed."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


class Processes:
    """The worker processes of one pool, and the pool's connection to the fork server.

    When the connection ends, the fork server kills the processes.

    Args:
        preload: kind of fork server, see ``fork_server``.
        python: the interpreter that runs the fork server, if it is not this one.
        timeout: seconds to connect to the fork server.
    """

    def __init__(self, preload: str, python: str | None, timeout: float) -> None:
        self._preload = preload
        self._python = python
        self._timeout = timeout
        self._on_worker_exited: Callable[[Worker, int], None]
        self._workers: dict[int, Worker] = {}
        self._folder: Path | None = None
        self._connection: ForkConnection | None = None
        self._server: ForkServer | None = None
        self._connecting = asyncio.Lock()

    def start(self, on_exited: Callable[[Worker, int], None]) -> Path:
        """Start the fork server, if it does not run.

        Args:
            on_exited: ``on_exited(worker, status)`` is called when a process of the worker has
                exited. A negative status is the number of a signal.

        Returns:
            The folder for the pool's files: its socket and the logs of its workers.
        """
        self._on_worker_exited = on_exited
        server = fork_server(self._preload, self._python)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=server.folder))
        except OSError as error:
            raise no_file(server.folder, error) from None
        # At interpreter exit the fork server's folder is removed, which contains this folder.
        weakref.finalize(self, _remove, self._folder, os.getpid()).atexit = False
        return self._folder

    async def connect(self) -> None:
        """Connect to the fork server, unless connected. Start a new fork server if it was lost.

        Raises:
            WorkerStartError: the fork server could not start, or was not ready in time.
        """
        async with self._connecting:
            if self._connection is not None and self._connection.alive:
                return
            try:
                self._connection = await self._connect()
            except TimeoutError:
                raise WorkerStartError(
                    f"the fork server was not ready within {self._timeout:g} s (start_timeout)"
                ) from None

    async def _connect(self) -> ForkConnection:
        server = fork_server(self._preload, self._python)
        try:
            return await self._open(server)
        except WorkerStartError:
            # The fork server may be exiting: then use a new one. If it keeps running, keep it,
            # because it has workers of other pools.
            if not await asyncio.to_thread(server.ended, LAST_SECONDS):
                raise
            return await self._open(fork_server(self._preload, self._python))

    async def _open(self, server: ForkServer) -> ForkConnection:
        self._server = server
        return await ForkConnection.open(server, self._on_forked, self._on_exited, self._timeout)

    @property
    def lost(self) -> str:
        """Why the fork server was lost. Empty while the fork server runs."""
        if self._server is None:
            return ""
        lost = self._connection is not None and self._connection.lost
        return self._server.fault or ("its fork server ended" if lost else "")

    @property
    def leaving(self) -> bool:
        """Whether the program, and with it the fork server, is shutting down."""
        return self._server is not None and self._server.leaving

    def requests(
        self, worker: Worker, specs: Sequence[WorkerSpec], env: Mapping[str, str]
    ) -> list[bytes]:
        """Return the encoded ``Fork`` messages that start the worker's processes, one per rank.

        The processes get the environment of the fork server, updated with the current environment
        of the driver and with ``env``. Variables that the driver has deleted since it started the
        fork server remain set.

        Raises:
            UsageError: a part of a message cannot be encoded.
        """
        try:
            here = os.getcwd()
        except OSError:
            # The current folder was removed.
            here = "/"
        assert self._server is not None
        before = self._server.environ
        # The caller that places workers on GPUs sets CUDA_VISIBLE_DEVICES in ``env``.
        since = {
            name: value
            for name, value in os.environ.items()
            if before.get(name) != value
            and name != "CUDA_VISIBLE_DEVICES"
            and is_text(name + value)
        }
        # Python ignores entries that are not text.
        ours = [p or here for p in sys.path if isinstance(p, str) and is_text(p)]
        try:
            return [
                encode(
                    Fork(
                        key=worker.index * _RANKS + rank,
                        spec=spec,
                        env={**since, **env},
                        log=str(worker.log),
                        cwd=here,
                        sys_path=ours if self._python is None else None,
                    )
                )
                for rank, spec in enumerate(specs)
            ]
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the specification of a worker cannot be sent: {error}") from None

    def fork(self, worker: Worker, requests: Sequence[bytes]) -> None:
        assert self._connection is not None
        try:
            # Create the file here, so that the worker does not need a free inode when it opens it.
            worker.log.touch(mode=0o600)
        except OSError as error:
            raise no_file(worker.log.parent, error) from None
        for rank, request in enumerate(requests):
            key = worker.index * _RANKS + rank
            self._workers[key] = worker
            worker.running.add(rank)
            self._connection.fork(key, request)

    async def end(self, workers: Sequence[Worker], timeout: float) -> None:
        """Wait until all processes of the workers have exited. Kill them after ``timeout`` seconds.

        Return ``timeout`` seconds after that at the latest.
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
                # The kernel may need long, to free a GPU for example. The fork server waits for
                # these processes.
                left = [worker.index for worker in workers if worker.running]
                logger.warning("killed, but not exited yet: the processes of workers %s", left)

    def kill(self, worker: Worker) -> None:
        """Kill the worker's running processes with SIGKILL."""
        self._send(worker, Kill)

    def dump(self, worker: Worker) -> tuple[Path, int]:
        """Ask the worker's processes to write the stacks of their threads to the worker's log.

        Returns:
            The log, and its size in bytes before.
        """
        before = 0
        with contextlib.suppress(OSError):
            before = worker.log.stat().st_size
        self._send(worker, Dump)
        return worker.log, before

    def _send(self, worker: Worker, message: Callable[[int], Kill | Dump]) -> None:
        if self._connection is not None:
            for rank in worker.running:
                self._connection.send(message(worker.index * _RANKS + rank))

    def close(self) -> None:
        """Close the connection and remove the folder. The fork server kills remaining processes."""
        if self._connection is not None:
            self._connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _on_forked(self, key: int, pid: int) -> None:
        self._workers[key].pids[key % _RANKS] = pid

    def _on_exited(self, key: int, status: int) -> None:
        worker = self._workers[key]
        worker.running.discard(key % _RANKS)
        if not worker.running:
            worker.rendezvous.unlink(missing_ok=True)
        self._on_worker_exited(worker, status)
