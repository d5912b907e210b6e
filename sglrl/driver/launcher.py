"""Start the processes of a pool's workers: the interface, and the launcher for this machine."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from ..config import is_text
from ..errors import WorkerStartError
from ..transport.system_limits import no_file
from ..wire.codec import encode
from ..wire.processes import ActorSpec, Dump, EngineSpec, Fork, Kill, WorkerSpec
from .fork_server import (
    LAST_SECONDS,
    ForkConnection,
    ForkServer,
    fork_server,
    import_variables,
)
from .temporary_folders import remove_folder
from .worker_info import HostInfo

RANKS: Final = 1024
"""Maximum ranks of a worker. The key of a worker's process is ``index * RANKS + rank``."""


class LaunchSpec(msgspec.Struct, kw_only=True):
    """The processes of a worker, one per rank, and their environment variables."""

    bodies: Sequence[ActorSpec | EngineSpec]
    env: Mapping[str, str]


class Launcher(Protocol):
    """Starts and kills processes for one pool, and reports when they exit.

    The pool chooses a key for each process.
    """

    @property
    def elsewhere(self) -> bool:
        """Whether the processes run on other machines."""
        ...

    @property
    def driver_ip(self) -> str:
        """The IP address at which the workers reach this machine. Empty if unknown."""
        ...

    @property
    def stage(self) -> str:
        """The step that ``prepare`` waits for, in words. Empty if ``prepare`` takes no time."""
        ...

    @property
    def missing(self) -> str:
        """The resources that ``prepare`` still waits for, as a text for errors. May be empty."""
        ...

    @property
    def lost(self) -> str:
        """The reason why the launcher has lost processes or will lose them. Empty without one."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether the program is shutting down."""
        ...

    def start(
        self, on_forked: Callable[[int, int], None], on_exited: Callable[[int, int], None]
    ) -> Path:
        """Begin to use this launcher. Call this before ``prepare``.

        Args:
            on_forked: ``on_forked(key, pid)`` is called when a process runs.
            on_exited: ``on_exited(key, status)`` is called when a process has exited. A negative
                status is the number of a signal.

        Returns:
            The folder for the pool's files: the logs of its workers, and a socket.
        """
        ...

    async def prepare(self, launch_specs: Mapping[int, LaunchSpec]) -> None:
        """Make sure that the processes of workers can be started.

        Args:
            launch_specs: the launch specs of the workers, by the workers' indices.

        Raises:
            WorkerStartError: the processes cannot be started, or not in time.
        """
        ...

    def request(self, key: int, spec: WorkerSpec, env: Mapping[str, str], log: Path) -> bytes:
        """Return the encoded ``Fork`` message of a process.

        Raises:
            TypeError, ValueError, OverflowError: a part of the message cannot be encoded.
        """
        ...

    def fork(self, key: int, request: bytes) -> None:
        """Start a process."""
        ...

    def send(self, message: Kill | Dump) -> None:
        """Kill a process, or make it write the stacks of its threads to its log."""
        ...

    def release(self, index: int) -> None:
        """Release the place of a worker whose processes have exited and are not replaced."""
        ...

    def host(self, index: int) -> str:
        """Return the name of the host of a worker. Empty for this machine."""
        ...

    def reaches(self, index: int) -> bool:
        """Return whether the host of a worker is connected."""
        ...

    @property
    def hosts(self) -> list[HostInfo]:
        """The other machines on which processes may run."""
        ...

    async def close(self) -> None:
        """Kill the remaining processes and remove the folder."""
        ...


class LocalLauncher:
    """Starts processes on this machine, through a fork server.

    The fork server kills the processes when the connection to it ends.

    Args:
        preload: the kind of fork server, see ``fork_server``.
        python: the path of the fork server's interpreter. None: this process's interpreter.
        timeout: maximum seconds to wait for the fork server.
        env: the environment variables of the workers.
    """

    def __init__(
        self,
        preload: str,
        python: str | None,
        timeout: float,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._preload = preload
        self._python = python
        self._timeout = timeout
        self._early = import_variables(preload, env)
        self._on_forked: Callable[[int, int], None]
        self._on_exited: Callable[[int, int], None]
        self._folder: Path | None = None
        self._connection: ForkConnection | None = None
        self._server: ForkServer | None = None
        self._connecting = asyncio.Lock()

    @property
    def elsewhere(self) -> bool:
        return False

    @property
    def driver_ip(self) -> str:
        return ""

    @property
    def stage(self) -> str:
        sglang = self._preload.startswith("sglang")
        return "importing SGLang (once per program)" if sglang else ""

    @property
    def missing(self) -> str:
        return ""

    @property
    def lost(self) -> str:
        if self._server is None:
            return ""
        lost = self._connection is not None and self._connection.lost
        return self._server.fault or ("its fork server ended" if lost else "")

    @property
    def leaving(self) -> bool:
        return self._server is not None and self._server.leaving

    def start(
        self, on_forked: Callable[[int, int], None], on_exited: Callable[[int, int], None]
    ) -> Path:
        """Start the fork server if needed, and make the pool's folder."""
        self._on_forked = on_forked
        self._on_exited = on_exited
        server = fork_server(self._preload, self._python, self._early)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=server.folder))
        except OSError as error:
            raise no_file(server.folder, error) from None
        # At interpreter exit, the fork server's folder is removed with this folder in it.
        weakref.finalize(self, remove_folder, self._folder, os.getpid()).atexit = False
        return self._folder

    async def prepare(self, launch_specs: Mapping[int, LaunchSpec]) -> None:
        """Connect to the fork server if needed. If the fork server was lost, start a new one.

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
        server = fork_server(self._preload, self._python, self._early)
        try:
            return await self._open(server)
        except WorkerStartError:
            # If the fork server exits now, use a new one. If it keeps running, do not replace it,
            # because other pools may have workers there.
            if not await asyncio.to_thread(server.ended, LAST_SECONDS):
                raise
            return await self._open(fork_server(self._preload, self._python, self._early))

    async def _open(self, server: ForkServer) -> ForkConnection:
        self._server = server
        return await ForkConnection.open(server, self._on_forked, self._on_exited, self._timeout)

    def request(self, key: int, spec: WorkerSpec, env: Mapping[str, str], log: Path) -> bytes:
        """Return the encoded ``Fork`` message of a process.

        The process gets the environment of the fork server, updated with the current environment
        of the driver and with ``env``. Variables that the driver has deleted since it started the
        fork server remain set.
        """
        try:
            here = _as_utf8(os.getcwd())
        except OSError:
            # The current folder was removed.
            here = "/"
        assert self._server is not None
        before = self._server.environ
        # CUDA_VISIBLE_DEVICES is in ``env`` if the caller has placed the worker on GPUs.
        since = {
            _as_utf8(name): _as_utf8(value)
            for name, value in os.environ.items()
            if before.get(name) != value
            and name != "CUDA_VISIBLE_DEVICES"
            and is_text(_as_utf8(name + value))
        }
        # Python ignores entries of ``sys.path`` that are not strings.
        path = [_as_utf8(p) or here for p in sys.path if isinstance(p, str)]
        return encode(
            Fork(
                key=key,
                spec=spec,
                env={**since, **env},
                log=_as_utf8(str(log)),
                cwd=here,
                sys_path=[p for p in path if is_text(p)] if self._python is None else None,
            )
        )

    def fork(self, key: int, request: bytes) -> None:
        assert self._connection is not None
        self._connection.fork(key, request)

    def send(self, message: Kill | Dump) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def release(self, index: int) -> None:
        """Do nothing: the caller places workers on this machine's GPUs."""

    def host(self, index: int) -> str:
        return ""

    def reaches(self, index: int) -> bool:
        return True

    @property
    def hosts(self) -> list[HostInfo]:
        return []

    async def close(self) -> None:
        """Close the connection and remove the folder. The fork server kills the processes."""
        if self._connection is not None:
            self._connection.close()
        if self._folder is not None:
            remove_folder(self._folder, os.getpid())


def _as_utf8(text: str) -> str:
    """Return the text of a path or environment variable, decoded from UTF-8.

    If the locale is not UTF-8, as with ``LC_ALL=C``, Python decodes other characters than ASCII as
    lone surrogates. Workers always use UTF-8.
    """
    return text if is_text(text) else os.fsencode(text).decode("utf-8", "surrogateescape")
