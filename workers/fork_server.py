"""The warm fork server: ``python -m sglrl_workers.fork_server FD PRELOAD DRIVER``.

FD is a listening unix socket that it inherits, DRIVER the process id of its parent. It imports what
PRELOAD names, then has a worker for every ``Fork`` message: a fork that waits already, because
forking a process of this size takes a while where others are busy, or one made for it.
Single-threaded, and it never touches a GPU: that is what makes forking from it safe.

Who watches whom: stdin is a pipe from the driver and its end means that the driver is gone, as
does the end of the driver's process (a pidfd, because a pipe can be inherited by a process that
outlives the driver); a worker belongs to the connection that asked for it. Workers are told by the
kernel to die with this process (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sglrl.system_limits import explain, reason
from sglrl.wire.codec import encode
from sglrl.wire.processes import (
    Dump,
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

PRELOADS = {
    "plain": ("sglrl_workers.actor_worker",),
    "sglang": ("sglrl_workers.actor_worker", "sglrl_workers.engine.sglang.preload"),
    "sglang-cuda": ("sglrl_workers.actor_worker", "sglrl_workers.preload_cuda"),
}
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_ARENA_MAX = -8
_CLONE_FILES = 0x400
_SERVER_SCORE = 200
_WORKER_SCORE = 300
"""What is added to ``oom_score_adj``: by the fork server to the driver's, by a worker to the fork
server's. Where memory runs out, the kernel kills a worker first, which can be replaced, then the
fork server, with which all workers end, and the driver last."""
_QUIET = 1.0
"""Seconds without work, after which the next fork is made: then it takes no time from a worker that
starts. To answer a ``Ping`` is not work."""


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel for a signal to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def raise_oom_score(by: int) -> None:
    """Make the kernel prefer this process when it kills one because memory has run out."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(str(min(1000, int(path.read_text()) + by)))


def call_this_process(name: str) -> None:
    """In ``ps`` and the like. At most 15 characters of ASCII."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def limit_arenas(most: int) -> None:
    """The most arenas that malloc makes in this process and its forks, where it is glibc's."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, most)


def end_with_process(fd: int) -> None:
    """Close ``fd`` here, but for a thread whose files are its own and which does nothing. When this
    process is killed, that thread is gone at once, and the other end of a pipe notices; what else
    the process has is closed after its memory has been taken down, which takes a while."""
    kept = threading.Event()

    def wait() -> None:
        # To be killed is all that can happen to it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        libc = ctypes.CDLL(None)
        try:
            own = libc.unshare(_CLONE_FILES) == 0
            for other in map(int, os.listdir("/proc/thread-self/fd") if own else ()):
                if other != fd:
                    # That of the listing is closed already.
                    with contextlib.suppress(OSError):
                        os.close(other)
        finally:
            # Whoever starts must not wait for what failed here.
            kept.set()
        while own:
            libc.pause()

    threading.Thread(target=wait, name="sglrl-end", daemon=True).start()
    kept.wait()
    os.close(fd)


def outlive_parent() -> None:
    """Undo ``die_with_parent``: from now on the parent's end is noticed as an event, which also
    holds when the *thread* that started this process ends before the parent does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


class Client:
    """One connection and the workers that belong to it, by pid."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = bytearray()
        self.keys: dict[int, int] = {}

    def send(self, message: FromForkServer) -> None:
        body = encode(message)
        with contextlib.suppress(OSError):
            self.connection.sendall(struct.pack("<I", len(body)) + body)


class ForkServer:
    def __init__(self, listener: socket.socket, driver: int, *, ahead: bool) -> None:
        self.ahead = ahead
        self.spare: tuple[int, int] | None = None
        """Process id of a fork that waits for its ``Fork``, and the pipe to write it to."""
        self.worked = time.monotonic()
        """When there was work last."""
        self.ends: dict[int, int] = {}
        """By process id of a worker: the pipe that ends with it."""
        self.selector = selectors.DefaultSelector()
        self.clients: dict[int, Client] = {}
        self.decoder: msgspec.msgpack.Decoder[ToForkServer] = msgspec.msgpack.Decoder(ToForkServer)
        self.listener = listener
        listener.setblocking(False)
        self.folder = Path(listener.getsockname()).parent
        self.reserve = os.open(os.devnull, os.O_RDONLY)
        self.wake_read, self.wake_write = os.pipe()
        os.set_blocking(self.wake_write, False)
        os.set_blocking(self.wake_read, False)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.warm = Warm(0.0)
        self.pidfd = os.pidfd_open(driver)
        self._watch(0, lambda: self.leave())
        self._watch(self.pidfd, lambda: self.leave())
        self._watch(self.wake_read, self.reap)
        self._watch(self.listener.fileno(), self.accept)

    def _watch(self, fd: int, callback: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, callback)

    def preload(self, name: str) -> None:
        begun = time.monotonic()
        error = ""
        if name == "sglang":
            # Workers on CPU share its cores with each other and the driver: OpenMP threads that
            # spin while they wait would take them from whoever has work. Read when torch loads.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            # SGLang compiles a few small functions when they are first used, with a C++ compiler: a
            # worker would stand still for eight seconds at the first repetition penalty.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
            # Each thread of a weight update would otherwise have an arena of its own, which keeps
            # what was once needed.
            limit_arenas(1)
            # Importing SGLang where it sees a GPU initialises CUDA, after which nothing may fork.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            for module in PRELOADS[name]:
                importlib.import_module(module)
        except BaseException:
            error = traceback.format_exc()
        # What is imported stays: keep the collector of every fork from touching these pages.
        gc.collect()
        gc.freeze()
        self.warm = Warm(time.monotonic() - begun, error)

    def serve(self) -> None:
        while True:
            wanted = self.ahead and self.spare is None and self.clients
            quiet_in = self.worked + _QUIET - time.monotonic()
            for key, _ in self.selector.select(max(0.0, quiet_in) if wanted else None):
                key.data()
            if wanted and self.spare is None and time.monotonic() >= self.worked + _QUIET:
                self.worked = time.monotonic()
                # What cannot be had now is tried again when it is asked for.
                with contextlib.suppress(OSError):
                    self.fork_ahead()

    @contextlib.contextmanager
    def one_more_file(self) -> Iterator[None]:
        """What is kept to say that there are no more. What cannot be done even so is left out."""
        os.close(self.reserve)
        with contextlib.suppress(OSError):
            yield
        self.reserve = os.open(os.devnull, os.O_RDONLY)

    def accept(self) -> None:
        self.worked = time.monotonic()
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            # Who came has gone again.
            return
        except OSError:
            traceback.print_exc()
            # Who comes is told so by the end of the connection.
            with self.one_more_file():
                self.listener.accept()[0].close()
            return
        client = Client(connection)
        self.clients[connection.fileno()] = client
        self._watch(connection.fileno(), lambda: self.read(client))
        client.send(self.warm)

    def read(self, client: Client) -> None:
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
                # Of another version of the program, say: its workers end, and nobody else's.
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
        try:
            pid = self.use_spare(request)
            if pid is None:
                # One that could not be written to has ended.
                self.fork_ahead()
                pid = self.use_spare(request)
            if pid is None:
                raise ChildProcessError("a process that has just been forked is gone")
        except OSError as error:
            # No more files, processes or memory: this worker cannot be, and the others live on.
            with self.one_more_file():
                Path(request.log).write_text(f"the fork server could not fork: {reason(error)}\n")
            client.send(Exited(request.key, error.errno or 1))
            return
        client.keys[pid] = request.key
        client.send(Forked(request.key, pid))

    def fork_ahead(self) -> None:
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
                self.forget(parent)
                self.become_worker(request, kept)
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
        """A worker is being killed. On a CPU it has let others go first; now all wait for its end,
        and that takes three times as long as need be."""
        self.forget_end(pid)
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text("0")

    def forget_end(self, pid: int) -> None:
        end = self.ends.pop(pid, None)
        if end is not None:
            self.selector.unregister(end)
            os.close(end)

    def use_spare(self, request: Fork) -> int | None:
        if self.spare is None:
            return None
        (pid, pipe), self.spare = self.spare, None
        try:
            with open(pipe, "wb") as file:
                file.write(encode(request))
        except BrokenPipeError:
            return None
        return pid

    def forget(self, parent: int) -> None:
        """In the child: everything of the fork server."""
        die_with_parent(parent)
        raise_oom_score(_WORKER_SCORE)
        call_this_process("sglrl spare")
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        ours = (self.reserve, self.wake_read, self.wake_write, self.pidfd, *self.ends.values())
        for fd in (null, *ours):
            os.close(fd)
        self.selector.close()
        self.listener.close()
        for client in self.clients.values():
            client.connection.close()

    def become_worker(self, pipe: int, kept: int) -> None:
        """In the child: be the worker that is asked for through the pipe, if there is one."""
        with open(pipe, "rb") as file:
            body = file.read()
        if not body:
            return
        call_this_process("sglrl worker")
        request = msgspec.msgpack.decode(body, type=Fork)
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        end_with_process(kept)
        # In C, so that it also works while no Python can run.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
        os.environ.update(request.env)
        with contextlib.suppress(OSError):
            # It may have been removed.
            os.chdir(request.cwd)
        sys.path[:] = request.sys_path
        sys.argv[:] = ["sglrl-worker"]
        from .__main__ import run

        run(request.spec)

    def reap(self) -> None:
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
                    # Whatever the worker started itself goes with it.
                    kill_group(pid)
                    client.send(Exited(key, os.waitstatus_to_exitcode(status)))

    def drop(self, client: Client) -> None:
        self.selector.unregister(client.connection.fileno())
        del self.clients[client.connection.fileno()]
        client.connection.close()
        for pid in client.keys:
            kill_group(pid)
        # They are reaped when SIGCHLD comes; nobody is left to tell.

    def leave(self) -> None:
        """The driver is gone."""
        for client in self.clients.values():
            for pid in client.keys:
                kill_group(pid)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)


def kill_group(pid: int) -> None:
    # The worker may not have called setsid yet.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def main() -> None:
    listener, preload, driver = socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(listener.getsockname()).parent

    def orphaned(*_: object) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    # Importing takes a while, in which nothing is watched.
    signal.signal(signal.SIGTERM, orphaned)
    die_with_parent(int(driver), signal.SIGTERM)
    raise_oom_score(_SERVER_SCORE)
    # Plain actors are forked from a small process.
    server = ForkServer(listener, int(driver), ahead=preload != "plain")
    server.preload(preload)
    outlive_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    server.serve()


if __name__ == "__main__":
    main()
