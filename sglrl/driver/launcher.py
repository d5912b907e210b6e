"""Where the processes of a pool's workers are started: the protocol, and this machine."""

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

RANKS: Final = 1024
"""The key of a worker's process is ``index * RANKS + rank``."""


class LaunchSpec(msgspec.Struct, kw_only=True):
    """How to start a worker: one process per rank."""

    bodies: Sequence[ActorSpec | EngineSpec]
    env: Mapping[str, str]


class Launcher(Protocol):
    """Starts and kills processes for one pool, and reports when they exit.

    A process has a key, which the pool chooses.
    """

    @property
    def elsewhere(self) -> bool:
        """Whether the processes run on other machines."""
        ...

    @property
    def driver_ip(self) -> str:
        """The IP address of this machine at which the workers reach it; "": not known."""
        ...

    @property
    def stage(self) -> str:
        """What ``prepare`` waits for, in words. Empty if it takes no time."""
        ...

    @property
    def missing(self) -> str:
        """What ``prepare`` still waits for, in words for an error. Empty if unknown."""
        ...

    @property
    def lost(self) -> str:
        """Why running processes have ended or will end, if that is not their own fault."""
        ...

    @property
    def leaving(self) -> bool:
        """Whether the program is shutting down."""
        ...

    def start(
        self, on_forked: Callable[[int, int], None], on_exited: Callable[[int, int], None]
    ) -> Path:
        """Begin to use this launcher, before ``prepare``.

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
            launch_specs: how they start, by their indices.

        Raises:
            WorkerStartError: they cannot, or not in time.
        """
        ...

    def request(self, key: int, spec: WorkerSpec, env: Mapping[str, str], log: Path) -> bytes:
        """Return the encoded ``Fork`` message of a process.

        Raises:
            TypeError, ValueError, OverflowError: a part of it cannot be encoded.
        """
        ...

    def fork(self, key: int, request: bytes) -> None:
        """Start a process."""
        ...

    def send(self, message: Kill | Dump) -> None:
        """Kill a process, or make it write the stacks of its threads to its log."""
        ...

    def release(self, index: int) -> None:
        """Give up the place of a worker whose processes have exited and are not replaced."""
        ...

    def host(self, index: int) -> str:
        """Return the name of the host of a worker; empty: this machine."""
        ...

    def reaches(self, index: int) -> bool:
        """Return whether the host of a worker is connected."""
        ...

    async def close(self) -> None:
        """Kill the remaining processes and remove the folder."""
        ...


class LocalLauncher:
    """Starts processes on this machine, through a fork server.

    The fork server kills the processes when the connection to it ends.

    Args:
        preload: kind of fork server, see ``fork_server``.
        python: the interpreter that runs the fork server, if it is not this one.
        timeout: seconds to connect to the fork server.
        env: variables of the workers.
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
        """Start the fork server, if it does not run."""
        self._on_forked = on_forked
        self._on_exited = on_exited
        server = fork_server(self._preload, self._python, self._early)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="pool-", dir=server.folder))
        except OSError as error:
            raise no_file(server.folder, error) from None
        # At interpreter exit the fork server's folder is removed, which contains this folder.
        weakref.finalize(self, remove_folder, self._folder, os.getpid()).atexit = False
        return self._folder

    async def prepare(self, launch_specs: Mapping[int, LaunchSpec]) -> None:
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
        server = fork_server(self._preload, self._python, self._early)
        try:
            return await self._open(server)
        except WorkerStartError:
            # The fork server may be exiting: then use a new one. If it keeps running, keep it,
            # because it has workers of other pools.
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
        # The caller that places workers on GPUs sets CUDA_VISIBLE_DEVICES in ``env``.
        since = {
            _as_utf8(name): _as_utf8(value)
            for name, value in os.environ.items()
            if before.get(name) != value
            and name != "CUDA_VISIBLE_DEVICES"
            and is_text(_as_utf8(name + value))
        }
        # Python ignores entries that are not text.
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

    async def close(self) -> None:
        """Close the connection and remove the folder. The fork server kills the processes."""
        if self._connection is not None:
            self._connection.close()
        if self._folder is not None:
            remove_folder(self._folder, os.getpid())


def _as_utf8(text: str) -> str:
    """Return a path or variable of the system, whose bytes are UTF-8, as text.

    Python reads it as lone surrogates if the locale is not UTF-8, as with ``LC_ALL=C``. Workers
    always use UTF-8.
    """
    return text if is_text(text) else os.fsencode(text).decode("utf-8", "surrogateescape")
