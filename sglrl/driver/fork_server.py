"""The warm fork server: a child process that imports SGLang once, and then forks workers.

Importing SGLang takes 20 s, but a fork takes milliseconds. The fork server of ``multiprocessing``
imports the user's ``__main__`` again in every child, which breaks notebooks and scripts without a
``__main__`` guard. This fork server does not import the user's program.

Each pool holds one connection to the fork server. A worker belongs to the connection that requested
it. When the connection ends for any reason, the fork server kills the connection's workers. The
fork server watches its parent. When the driver exits for any reason, the fork server and all
workers exit too.

Each connection sends the fork server a ``Ping`` every second. A fork server that does not answer
for ``SILENCE`` seconds (it is stopped, or the machine is out of memory) is killed together with its
workers. The next pool that needs a worker starts a new fork server.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

import msgspec

from ..config import install
from ..core.hangs import HangDetector
from ..errors import WorkerStartError
from ..transport.system_limits import no_file, reason
from ..wire.codec import encode
from ..wire.processes import Dump, Exited, Forked, FromForkServer, Kill, Ping, Pong, Warm
from .causes import signal_name
from .temporary_folders import make_folder, remove_folder

logger = logging.getLogger("sglrl.spawn")

_READ_LATER: Final = ("CUDA_VISIBLE_DEVICES", "NCCL_")
"""Prefixes of variable names. SGLang reads these variables only after the imports."""

SILENCE = 60.0
"""Seconds that a fork server may take to answer after its imports. A fork takes less than a second,
even on a busy machine. The limit is long, because killing a fork server also kills its workers."""
LAST_SECONDS = 5.0
"""Seconds that a killed fork server may take to exit."""
_TAIL_BYTES: Final = 1 << 17
"""Maximum number of bytes of a log that are read. The stacks of all threads of a worker fit."""
_decoder = msgspec.msgpack.Decoder(FromForkServer)
_servers: dict[tuple[str, str | None, frozenset[tuple[str, str]]], ForkServer] = {}
"""The latest fork server for each combination of preload, interpreter and variables."""
_dead: list[ForkServer] = []
_lock = threading.Lock()
_at_exit = False


def tail(path: str | Path, lines: int = 40) -> str:
    """Return the last lines of a log file, or an empty string if it cannot be read.

    A line is the text that a terminal shows: without the text before a carriage return.
    """
    try:
        with Path(path).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    shown = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")]
    return "\n".join(shown[-lines:])


_LONGEST_BASE = 64
"""Maximum bytes of the base folder's path. The path of a socket in a pool's folder then does not
exceed the system's limit of 107 bytes."""


def _private_folder() -> Path:
    """Create a folder for sockets that only this user can access.

    The folder is in /tmp if the path of ``TMPDIR`` is too long for sockets.
    """
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise no_file("any of the system's folders for temporary files", error) from None
    if len(os.fsencode(base)) > _LONGEST_BASE:
        base = "/tmp"
    try:
        return make_folder(base=base)
    except OSError as error:
        raise WorkerStartError(
            f"no folder for sockets can be made in {base} ({error.strerror}); set TMPDIR to one "
            f"that can be written, with a path of at most {_LONGEST_BASE} bytes"
        ) from None


class ForkServer:
    """A running fork server process and the private folder (0700) that contains its sockets."""

    def __init__(self, preload: str, python: str | None, env: Mapping[str, str]) -> None:
        self.preload = preload
        self.python = python or sys.executable
        self.warm = False
        self.leaving = False
        self.fault = ""
        """The reason for which the fork server was killed. Empty if it was not killed."""
        self.pid = os.getpid()
        self.folder = _private_folder()
        self.path = self.folder / "fork.sock"
        self.log = self.folder / "fork.log"
        self.environ = {**os.environ, **env}
        """Environment variables of the fork server process."""
        try:
            self.process = self._start()
        except BaseException:
            remove_folder(self.folder, self.pid)
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            try:
                log = stack.enter_context(self.log.open("wb"))
                listener = stack.enter_context(socket.socket(socket.AF_UNIX))
                # The child inherits the bound socket, so that connections succeed before it runs.
                listener.bind(str(self.path))
                listener.listen(64)
            except OSError as error:
                raise no_file(self.folder, error) from None
            try:
                return subprocess.Popen(
                    [
                        self.python,
                        # Read and write UTF-8 in files and file names, whatever the locale is.
                        "-X",
                        "utf8",
                        "-m",
                        "sglrl_workers.fork_server",
                        str(listener.fileno()),
                        self.preload,
                        str(self.pid),
                    ],
                    pass_fds=[listener.fileno()],
                    # Without this variable, a package that SGLang imports creates a folder
                    # elsewhere and does not remove it.
                    env={"CUDA_TILE_TEMP_DIR": str(self.folder / "cuda-tile"), **self.environ},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # The driver handles Ctrl-C in the terminal. Its workers must not receive it.
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                raise WorkerStartError(
                    f"the fork server cannot be started: {reason(error)}"
                ) from None

    @property
    def alive(self) -> bool:
        return self.pid == os.getpid() and self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped, by SIGSTOP for example."""
        try:
            flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, flags) is not None
        except ChildProcessError:
            return False

    def kill(self, fault: str) -> None:
        """Kill the fork server and all its workers because of a fault."""
        self.fault = fault
        self.process.kill()

    def ended(self, timeout: float) -> bool:
        """Return whether the process has exited or exits within ``timeout`` seconds."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Shut down the fork server and all its workers."""
        if self.pid != os.getpid():
            return
        if self.process.stdin is not None:
            self.process.stdin.close()
        if not self.warm:
            # The fork server is still importing, so it does not read stdin and has no workers.
            self.process.kill()
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        remove_folder(self.folder, self.pid)


def import_variables(preload: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that matter when a fork server imports its modules.

    Pools share a fork server if these variables are equal. Of this process's own variables, only
    the variables of SGLang are included.

    Args:
        preload: the kind of modules, see ``fork_server``.
        env: the variables of the workers, in addition to the variables of this process.
    """
    if not preload.startswith("sglang"):
        return {}
    own = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
    return own | {n: value for n, value in env.items() if not n.startswith(_READ_LATER)}


def fork_server(
    preload: str, python: str | None = None, env: Mapping[str, str] = MappingProxyType({})
) -> ForkServer:
    """Return this process's fork server for ``preload`` and ``env``, and start it if needed.

    Args:
        preload: the kind of modules that the fork server imports first: "plain", "tokenizer",
            "sglang" or "sglang-cuda" (``workers/preloads.py``).
        python: path of the interpreter of the fork server. None: this process's interpreter.
        env: variables that the modules read when they are imported.
    """
    kind = preload, python, frozenset(env.items())
    with _lock:
        if _at_exit:
            raise WorkerStartError("the program ends: no fork server is started any more")
        server = _servers.get(kind)
        if server is None or not server.alive:
            if server is not None:
                # Pools that had workers of the old fork server still use its folder.
                _dead.append(server)
            server = _servers[kind] = ForkServer(preload, python, env)
        return server


def shutdown_fork_servers() -> None:
    """Shut down all fork servers of this process. This also happens at interpreter exit.

    Pools that are still open do not log the loss of their workers as an error.
    """
    with _lock:
        for server in (*_servers.values(), *_dead):
            server.leaving = True
        servers = [*_servers.values(), *_dead]
        _servers.clear()
        _dead.clear()
    for server in servers:
        server.close()


def _exit() -> None:
    global _at_exit
    _at_exit = True
    shutdown_fork_servers()


atexit.register(_exit)


class ForkConnection(asyncio.Protocol):
    """One pool's connection to the fork server: requests workers and is notified of their exits.

    ``on_forked(key, pid)`` and ``on_exited(key, status)`` run on the event loop.
    """

    def __init__(
        self,
        server: ForkServer,
        on_forked: Callable[[int, int], None],
        on_exited: Callable[[int, int], None],
    ) -> None:
        self._server = server
        self._on_forked = on_forked
        self._on_exited = on_exited
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        # The finalizer does not run at interpreter exit, where the fork server is shut down.
        weakref.finalize(self, _hang_up, self._socket, os.getpid()).atexit = False
        self._transport: asyncio.WriteTransport | None = None
        self._keys: set[int] = set()
        self._answers = 0
        self._detector: HangDetector | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.lost = False
        """Whether the connection to the fork server is lost."""
        self.warm: asyncio.Future[Warm] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        server: ForkServer,
        on_forked: Callable[[int, int], None],
        on_exited: Callable[[int, int], None],
        timeout: float,
    ) -> ForkConnection:
        """Connect and wait until the server is warm: it has imported its modules.

        Raises:
            WorkerStartError: the server exited, did not answer, or could not import the packages
                of its ``preload``.
            TimeoutError: the server is not warm within ``timeout`` seconds.
        """
        loop = asyncio.get_running_loop()
        connection = cls(server, on_forked, on_exited)
        sock = connection._socket
        try:
            async with asyncio.timeout(min(timeout, SILENCE) if server.warm else timeout):
                await loop.sock_connect(sock, str(server.path))
                await loop.create_unix_connection(lambda: connection, sock=sock)
                warm = await connection.warm
        except TimeoutError:
            connection.close()
            if server.warm and timeout >= SILENCE:
                server.kill(_silent())
                raise WorkerStartError(server.fault, output=tail(server.log)) from None
            raise
        except OSError:
            connection.close()
            await asyncio.to_thread(server.ended, LAST_SECONDS)
            raise _start_error(server) from None
        except BaseException:
            connection.close()
            raise
        finally:
            if not server.warm and server.stopped:
                # A stopped process may never continue.
                server.kill("the fork server was stopped while it imported, and was killed")
        server.warm = True
        connection._watch()
        if warm.error:
            connection.close()
            server.close()
            raise WorkerStartError(
                f"{server.python} could not import what {server.preload!r} workers need; is the "
                f"extra installed there ({install('sglang')})?",
                output=warm.error,
            )
        return connection

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def fork(self, key: int, body: bytes) -> None:
        """Send an encoded ``Fork`` message. If the server is lost, report the worker as killed."""
        if not self.alive:
            asyncio.get_running_loop().call_soon(self._on_exited, key, -9)
            return
        self._keys.add(key)
        self._write(body)

    def send(self, message: Kill | Dump) -> None:
        if self.alive:
            self._write(encode(message))

    def _write(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(struct.pack("<I", len(body)) + body)

    def _watch(self) -> None:
        """Start to send pings, and kill the server if it does not answer."""
        now = time.monotonic()
        self._detector = HangDetector(SILENCE, now)
        self._detector.watch(0, now)
        self._ask(self._detector)

    def _ask(self, detector: HangDetector) -> None:
        if not self.alive:
            return
        # To the detector, which watches workers with calls, the server is worker 0 with one call.
        if detector.check({0: 1}, time.monotonic()):
            logger.error("%s; its workers end with it", _silent())
            # The exit of the server also ends this connection.
            self._server.kill(_silent())
            return
        self._write(encode(Ping()))
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(detector.interval, self._ask, detector)

    def close(self) -> None:
        """Close the connection. The server kills the remaining workers of this connection."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is None:
            self._socket.close()
        else:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= 4:
            (size,) = struct.unpack_from("<I", buffer)
            if len(buffer) < 4 + size:
                return
            message = _decoder.decode(bytes(buffer[4 : 4 + size]))
            del buffer[: 4 + size]
            match message:
                case Warm():
                    if not self.warm.done():
                        self.warm.set_result(message)
                case Forked(key=key, pid=pid):
                    self._on_forked(key, pid)
                case Exited(key=key, status=status):
                    self._keys.discard(key)
                    self._on_exited(key, status)
                case Pong() if self._detector is not None:
                    self._answers += 1
                    self._detector.heartbeat(0, self._answers, "", time.monotonic())

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.warm.done():
            self.warm.set_exception(ConnectionError("the fork server is gone"))
            # Avoid asyncio's warning when no task awaits the future any more.
            with contextlib.suppress(ConnectionError):
                self.warm.exception()
        keys, self._keys = self._keys, set()
        for key in keys:
            self._on_exited(key, -9)


def _hang_up(sock: socket.socket, pid: int) -> None:
    """Shut down the socket of a connection that was garbage-collected without being closed.

    The fork server then kills the workers of the connection. The event loop may be closed already.
    """
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _silent() -> str:
    return f"the fork server did not answer for {SILENCE:g} s, and was killed"


def _start_error(server: ForkServer) -> WorkerStartError:
    status = server.process.poll()
    if status is None:
        what = "took no connection"
    elif status < 0:
        what = f"was killed by {signal_name(-status)}"
    else:
        what = f"ended with status {status}"
    return WorkerStartError(f"the fork server {what}", output=tail(server.log))
