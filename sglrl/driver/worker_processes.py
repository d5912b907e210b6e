"""The processes of a pool's workers, one a rank: forked by the fork server, killed through it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..config import is_text
from ..errors import UsageError, WorkerStartError
from ..system_limits import no_file
from ..wire.calls import Ready
from ..wire.codec import encode
from ..wire.processes import Dump, Fork, Kill, WorkerSpec
from .fork_server import LAST_SECONDS, ForkConnection, ForkServer, fork_server

_RANKS = 1024


class Worker:
    """The processes of one worker (all its ranks) and what they have said. A replacement is another
    ``Worker`` of the same index."""

    def __init__(self, index: int, identity: bytes, folder: Path) -> None:
        self.index = index
        self.identity = identity
        self.log = folder / f"worker-{index}.log"
        self.rendezvous = folder / f"ranks-{identity.decode()}"
        """A file, and not a port, which another program could take between the moment that it is
        chosen and the one that it is used."""
        self.pids: dict[int, int] = {}
        self.running: set[int] = set()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.drained = asyncio.Event()
        self.settled = asyncio.Event()
        """It serves, or waits for weights, or is gone."""
        self.exit_reason = ""
        self.lost = False
        self.returns = False
        """When it is lost, a replacement is to come: not before its start was a success."""
        self.restart_in: float | None = None

    @property
    def is_ready(self) -> bool:
        """It has said so, and may be gone by now."""
        ready = self.ready
        return ready.done() and not ready.cancelled() and ready.exception() is None


def _remove(folder: Path, pid: int) -> None:
    """Remove the folder of a pool that was collected without being closed."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


class Processes:
    """Those of one pool, and its connection to the fork server, which they end with.

    ``on_exited(worker, status)``: one of the worker's processes has ended; a negative status is a
    signal's number.
    """

    def __init__(
        self, preload: str, timeout: float, on_exited: Callable[[Worker, int], None]
    ) -> None:
        self._preload = preload
        self._timeout = timeout
        self._on_worker_exited = on_exited
        self._workers: dict[int, Worker] = {}
        self._folder: Path | None = None
        self._connection: ForkConnection | None = None
        self._server: ForkServer | None = None
        self._connecting = asyncio.Lock()

    def start(self) -> Path:
        """Start the fork server, if it does not run. The folder of the pool's files: the logs of
        its workers, and its socket."""
        server = fork_server(self._preload)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=server.folder))
        except OSError as error:
            raise no_file(server.folder, error) from None
        # At interpreter exit the fork server's folder is removed, and this one with it.
        weakref.finalize(self, _remove, self._folder, os.getpid()).atexit = False
        return self._folder

    async def connect(self) -> None:
        """Connect to the fork server, unless there is a connection. A fork server that was lost is
        replaced by a new one.

        Raises:
            WorkerStartError: the fork server could not start.
            TimeoutError: it was not ready in time.
        """
        async with self._connecting:
            if self._connection is not None and self._connection.alive:
                return
            server = fork_server(self._preload)
            try:
                self._connection = await self._connect(server)
            except WorkerStartError:
                # It may be this one's end that is only just coming. One that lives has workers of
                # other pools.
                if not await asyncio.to_thread(server.ended, LAST_SECONDS):
                    raise
                self._connection = await self._connect(fork_server(self._preload))

    @property
    def lost(self) -> str:
        """Why the fork server is gone; empty while it is there."""
        if self._server is None:
            return ""
        lost = self._connection is not None and self._connection.lost
        return self._server.fault or ("its fork server ended" if lost else "")

    @property
    def leaving(self) -> bool:
        """The program ends, and the fork server with it."""
        return self._server is not None and self._server.leaving

    async def _connect(self, server: ForkServer) -> ForkConnection:
        self._server = server
        return await ForkConnection.open(server, self._on_forked, self._on_exited, self._timeout)

    def requests(
        self, worker: Worker, specs: Sequence[WorkerSpec], env: Mapping[str, str]
    ) -> list[bytes]:
        """To start the worker's processes, with the driver's environment as it is now and ``env``:
        a message for each, encoded. (What is no longer in the driver's is in theirs.)

        Raises:
            UsageError: something in it cannot be sent.
        """
        try:
            here = os.getcwd()
        except OSError:
            # It was removed.
            here = "/"
        assert self._server is not None
        before = self._server.environ
        # Which GPUs there are is said by whoever places workers on them.
        since = {
            name: value
            for name, value in os.environ.items()
            if before.get(name) != value
            and name != "CUDA_VISIBLE_DEVICES"
            and is_text(name + value)
        }
        # Others are no folders to Python either.
        path = [p or here for p in sys.path if isinstance(p, str) and is_text(p)]
        try:
            return [
                encode(
                    Fork(
                        key=worker.index * _RANKS + rank,
                        spec=spec,
                        env={**since, **env},
                        log=str(worker.log),
                        cwd=here,
                        sys_path=path,
                    )
                )
                for rank, spec in enumerate(specs)
            ]
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"a worker cannot be told what it is to be: {error}") from None

    def fork(self, worker: Worker, requests: Sequence[bytes]) -> None:
        assert self._connection is not None
        try:
            # That of the process before it has been shown. A file that is made here needs no room
            # when the worker opens it.
            worker.log.unlink(missing_ok=True)
            worker.log.touch(mode=0o600)
        except OSError as error:
            raise no_file(worker.log.parent, error) from None
        for rank, request in enumerate(requests):
            key = worker.index * _RANKS + rank
            self._workers[key] = worker
            worker.running.add(rank)
            self._connection.fork(key, request)

    def kill(self, worker: Worker) -> None:
        """With SIGKILL, those that have not ended."""
        self._send(worker, Kill)

    def dump(self, worker: Worker) -> None:
        """Have them write the stacks of their threads to the worker's log."""
        self._send(worker, Dump)

    def _send(self, worker: Worker, message: Callable[[int], Kill | Dump]) -> None:
        if self._connection is not None:
            for rank in worker.running:
                self._connection.send(message(worker.index * _RANKS + rank))

    def close(self) -> None:
        """The fork server kills what is left."""
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
