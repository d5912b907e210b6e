"""The warm fork server: ``python -m sglrl_workers.fork_server FD PRELOAD DRIVER``.

FD is the descriptor of an inherited, listening unix socket. PRELOAD names a kind of worker
(see ``preloads``). DRIVER is the process id of the parent. The fork server imports the modules of
PRELOAD, then starts a worker for every ``Fork`` message. The worker is a spare fork: a process that
was forked in advance, because forking a large process takes long while other processes are busy.
Without a spare fork, the server forks a new process. Forking is safe because the server has one
thread and never uses a GPU.

The processes watch each other:

* The fork server exits when its stdin, a pipe from the driver, closes. The server also watches a
  pidfd of the driver, because a process that outlives the driver can inherit the pipe and keep the
  pipe open.
* A worker belongs to the connection that requested it. The server kills the worker when this
  connection closes.
* The kernel kills the workers when the fork server exits (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sglrl.transport.system_limits import explain, reason
from sglrl.wire.codec import encode
from sglrl.wire.processes import (
    Dump,
    EngineSpec,
    Exited,
    Fork,
    Forked,
    FromForkServer,
    Kill,
    Ping,
    Pong,
    ToForkServer,
    Warm,
)

from .preloads import INSTEAD, preload
from .process_control import (
    die_with_parent,
    kill_group,
    outlive_parent,
    raise_oom_score,
    reset_priority,
)
from .worker_process import become_worker, detach

_SERVER_SCORE = 200
"""The difference between the ``oom_score_adj`` of the fork server and of the driver.

When memory runs out, the kernel kills a worker first, because a worker can be replaced. The fork
server comes next: its exit ends all workers. The driver comes last.
"""
_QUIET = 1.0
"""Seconds without work before the server makes the next spare fork.

The delay keeps the fork from slowing a worker that starts. Answering a ``Ping`` is not work.
"""


class Client:
    """One connection and its workers.

    Attributes:
        buffer: bytes received that are not yet a complete message.
        keys: the key of each worker, by process id.
        kept: by rank, the file descriptor of the memory that keeps the rank's weights after its
            worker has exited.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.keys: dict[int, int] = {}
        self.kept: dict[int, int] = {}

    def send(self, message: FromForkServer) -> None:
        body = encode(message)
        with contextlib.suppress(OSError):
            self.connection.sendall(struct.pack("<I", len(body)) + body)

    def with_kept(self, request: Fork) -> Fork:
        """Return the request, with the path of the rank's memory if the spec keeps the weights.

        Raises:
            OSError: the memory does not exist yet, and it could not be created.
        """
        body = request.spec.body
        if not (isinstance(body, EngineSpec) and body.keep_weights):
            return request
        if body.rank not in self.kept:
            self.kept[body.rank] = os.memfd_create("sglrl-kept-weights")
        # The worker may have been forked before this memory was made, so it opens the path.
        path = f"/proc/{os.getpid()}/fd/{self.kept[body.rank]}"
        body = msgspec.structs.replace(body, kept_weights=path)
        spec = msgspec.structs.replace(request.spec, body=body)
        return msgspec.structs.replace(request, spec=spec)

    def close(self) -> None:
        self.connection.close()
        for fd in self.kept.values():
            os.close(fd)


class ForkServer:
    """Forks workers for its clients and reports when they exit.

    Args:
        listener: the unix socket that clients connect to.
        driver: process id of the driver.
        warm: the message that each new client receives first.
        ahead: whether the server keeps a spare fork ready.
    """

    def __init__(self, listener: socket.socket, driver: int, warm: Warm, *, ahead: bool) -> None:
        self.warm = warm
        self.ahead = ahead
        self.spare: tuple[int, int] | None = None
        """Process id of the spare fork, and the pipe through which it receives its ``Fork``."""
        self.worked = time.monotonic()
        """Time of the last work."""
        self.ends: dict[int, int] = {}
        """By process id of a worker: the read end of a pipe that closes when the worker dies."""
        self.selector = selectors.DefaultSelector()
        self.clients: dict[int, Client] = {}
        self.decoder: msgspec.msgpack.Decoder[ToForkServer] = msgspec.msgpack.Decoder(ToForkServer)
        self.listener = listener
        listener.setblocking(False)
        self.folder = Path(listener.getsockname()).parent
        # ``one_more_file`` closes this file to free a descriptor.
        self.reserve = os.open(os.devnull, os.O_RDONLY)
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.pidfd = os.pidfd_open(driver)
        self._watch(0, lambda: self.leave())
        self._watch(self.pidfd, lambda: self.leave())
        self._watch(self.wake_read, self.reap)
        self._watch(self.listener.fileno(), self.accept)

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, callback)

    def serve(self) -> None:
        """Handle events forever, and make a spare fork when there is no work."""
        while True:
            wanted = self.ahead and self.spare is None and self.clients
            quiet_in = self.worked + _QUIET - time.monotonic()
            for key, _ in self.selector.select(max(0.0, quiet_in) if wanted else None):
                key.data()
            if wanted and self.spare is None and time.monotonic() >= self.worked + _QUIET:
                self.worked = time.monotonic()
                # After a failure, the next ``Fork`` message tries again.
                with contextlib.suppress(OSError):
                    self.fork_ahead()

    @contextlib.contextmanager
    def one_more_file(self) -> Iterator[None]:
        """Free the reserved file descriptor for a block that reports an error.

        Use this when the process has no other descriptor left. An ``OSError`` in the block is
        ignored.
        """
        os.close(self.reserve)
        with contextlib.suppress(OSError):
            yield
        self.reserve = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> None:
        """Accept a client and send it ``warm``."""
        self.worked = time.monotonic()
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            # The client has already closed its connection.
            return
        except OSError:
            traceback.print_exc()
            # The client notices the error because its connection closes.
            with self.one_more_file():
                self.listener.accept()[0].close()
            return
        client = Client(connection)
        self.clients[connection.fileno()] = client
        self._watch(connection.fileno(), lambda: self.read(client))
        client.send(self.warm)

    def read(self, client: Client) -> None:
        """Read from a client and handle every complete message."""
        try:
            data = client.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.drop(client)
            return
        buffer = client.buffer
        buffer += data
        while len(buffer) >= 4:
            (size,) = struct.unpack_from("<I", buffer)
            if len(buffer) < 4 + size:
                return
            try:
                message = self.decoder.decode(bytes(buffer[4 : 4 + size]))
            except msgspec.DecodeError:
                # The client may run another version. Kill only the workers of this client.
                traceback.print_exc()
                self.drop(client)
                return
            del buffer[: 4 + size]
            if type(message) is Ping:
                client.send(Pong())
                continue
            self.worked = time.monotonic()
            match message:
                case Fork():
                    self.fork(client, message)
                case Kill(key=key):
                    for pid, owned in client.keys.items():
                        if owned == key:
                            kill_group(pid)
                case Dump(key=key):
                    for pid, owned in client.keys.items():
                        if owned == key:
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(pid, signal.SIGUSR1)

    def fork(self, client: Client, request: Fork) -> None:
        """Start a worker. Send ``Forked``, or ``Exited`` if the start failed."""
        try:
            request = client.with_kept(request)
            pid = self.use_spare(request)
            if pid is None:
                # There is no spare fork, or it has exited.
                self.fork_ahead()
                pid = self.use_spare(request)
            if pid is None:
                raise ChildProcessError("a process exited right after its fork")
        except OSError as error:
            # No files, processes or memory are left. Only this worker fails.
            with self.one_more_file():
                Path(request.log).write_text(
                    f"the fork server could not fork: {reason(error)}\n", encoding="utf-8"
                )
            client.send(Exited(request.key, error.errno or 1))
            return
        client.keys[pid] = request.key
        client.send(Forked(request.key, pid))

    def fork_ahead(self) -> None:
        """Make the spare fork. Raise ``OSError`` if there are no resources for it."""
        parent = os.getpid()
        request, pipe = os.pipe()
        try:
            end, kept = os.pipe()
        except OSError:
            os.close(request)
            os.close(pipe)
            raise
        try:
            pid = os.fork()
        except OSError:
            for fd in (request, pipe, end, kept):
                os.close(fd)
            raise
        if pid == 0:
            try:
                os.close(pipe)
                os.close(end)
                detach(parent)
                self.close_files()
                become_worker(request, kept)
            except BaseException as error:
                traceback.print_exc()
                explain(error)
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        os.close(request)
        os.close(kept)
        self.spare = pid, pipe
        self.ends[pid] = end
        self._watch(end, lambda: self.hurry(pid))

    def hurry(self, pid: int) -> None:
        """Give a dying worker normal priority.

        A worker on a CPU runs with a low priority. With this priority, its exit takes three times
        as long, and other processes wait for the exit.
        """
        self.forget_end(pid)
        reset_priority(pid)

    def forget_end(self, pid: int) -> None:
        """Close the pipe that reports the death of this worker, if it is open."""
        end = self.ends.pop(pid, None)
        if end is not None:
            self.selector.unregister(end)
            os.close(end)

    def use_spare(self, request: Fork) -> int | None:
        """Turn the spare fork into a worker. Return its process id, or None without a spare."""
        if self.spare is None:
            return None
        (pid, pipe), self.spare = self.spare, None
        try:
            with open(pipe, "wb") as file:
                file.write(encode(request))
        except BrokenPipeError:
            return None
        return pid

    def close_files(self) -> None:
        """Close the files of the fork server. Called in the forked process."""
        for fd in (self.reserve, self.wake_read, self.wake_write, self.pidfd, *self.ends.values()):
            os.close(fd)
        self.selector.close()
        self.listener.close()
        for client in self.clients.values():
            client.close()

    def reap(self) -> None:
        """Report each worker's exit to the client that requested the worker."""
        self.worked = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.forget_end(pid)
            if self.spare is not None and self.spare[0] == pid:
                os.close(self.spare[1])
                self.spare = None
            for client in self.clients.values():
                key = client.keys.pop(pid, None)
                if key is not None:
                    # Kill the processes that the worker has started, too.
                    kill_group(pid)
                    client.send(Exited(key, os.waitstatus_to_exitcode(status)))

    def drop(self, client: Client) -> None:
        """Close a client's connection and kill its workers."""
        self.selector.unregister(client.connection.fileno())
        del self.clients[client.connection.fileno()]
        client.close()
        for pid in client.keys:
            kill_group(pid)
        # The SIGCHLD of each worker calls ``reap``, which has no client left to report to.

    def leave(self) -> None:
        """Kill all workers and exit, because the driver has exited."""
        for client in self.clients.values():
            for pid in client.keys:
                kill_group(pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def main() -> None:
    """Preload, then serve until the driver exits."""
    listener, name, driver = socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(listener.getsockname()).parent

    def orphaned(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    # Importing takes a while, and the server does not watch the driver during that time.
    signal.signal(signal.SIGTERM, orphaned)
    die_with_parent(int(driver), signal.SIGTERM)
    if name not in INSTEAD.values():
        # A server that restarted itself with ``execv`` has already raised its score.
        raise_oom_score(_SERVER_SCORE)
    warm = preload(name)
    if warm.error and name in INSTEAD:
        # Some modules may be imported in part, or CUDA is initialised, so restart the process.
        sys.stderr.write(f"workers will import SGLang themselves, because {warm.error}\n")
        sys.stderr.flush()
        # If the driver exits now, ``die_with_parent`` notices the exit in the new program.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        module = "sglrl_workers.fork_server"
        arguments = ["-X", "utf8", "-m", module, sys.argv[1], INSTEAD[name], driver]
        os.execv(sys.executable, [sys.executable, *arguments])
    # Plain actors are forked from a small process, so a spare fork saves no time.
    server = ForkServer(listener, int(driver), warm, ahead=name != "plain")
    # From now on, the server itself watches the driver's process.
    outlive_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server.serve()


if __name__ == "__main__":
    main()
