"""Inflict faults on the workers of a running client, with signals and shut-down connections.

Only processes in ``client.workers`` are struck, each through its own pidfd. A process that has
reused the process number of an exited worker is therefore never struck.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from pathlib import Path
from typing import Any

import sglrl

from .fault_load import Load, Strike
from .fault_schedule import DROP, FATAL, HANG, KILL, SLOW, STANDING, STOP, UPDATE, Fault

Update = Callable[[], Awaitable[Any]]
"""Makes one weight update."""
_POLL = 0.004
"""Seconds between checks of the workers' states. The measured time until a replacement is ready has
this error."""
_PATIENCE = 60.0
"""Seconds that the pool may take until all workers are ready again."""
_RUN, _REST = 0.02, 0.06
"""Seconds for which a slow worker runs, and seconds for which it is stopped, in turn."""
_AFTERMATH = 0.5
"""Seconds after a fault during which a call of the struck worker may move to a worker that is then
struck too."""
_PIDFD_GETFD = 438

_SIGNALS = {
    KILL: signal.SIGKILL,
    UPDATE: signal.SIGKILL,
    STOP: signal.SIGSTOP,
    HANG: signal.SIGSTOP,
    SLOW: signal.SIGSTOP,
}


class Striker:
    """Carries out faults, each in its own task, so that they overlap.

    Args:
        client: the client of the pool.
        load: the callers of the pool.
        spare: minimum number of ready workers without a fault, at any time.
        among: the ids of the workers that may be struck. None: all workers.
        update: makes one weight update.
    """

    def __init__(
        self,
        client: sglrl.Client,
        load: Load,
        *,
        spare: int = 1,
        among: Container[int] | None = None,
        update: Update | None = None,
    ) -> None:
        self.client = client
        self.load = load
        self.spare = spare
        self.among = among
        self.update = update
        self.strikes: list[Strike] = []
        self.updates = 0
        self.refused: Counter[str] = Counter()
        """Counts the weight updates that failed, by error. Failures are allowed if all workers keep
        their old weights."""
        self._disturbed: set[int] = set()
        self._standing: set[int] = set()
        self._replaced: dict[int, Strike] = {}
        self._whole = asyncio.Event()

    async def run(self, faults: Sequence[Fault]) -> None:
        """Carry out all faults. Return when all workers are ready again.

        After ``_PATIENCE`` seconds, return in any case. ``missing`` then lists the lost workers.
        """
        watch = asyncio.ensure_future(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                with contextlib.suppress(TimeoutError):
                    # A TimeoutError means that for too long no worker could be struck. ``missing``
                    # lists the reasons.
                    for fault in faults:
                        await asyncio.sleep(fault.gap)
                        worker, handle = await self._target(fault.target)
                        group.create_task(self._strike(fault, worker, handle))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self._whole.wait()
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    @property
    def missing(self) -> list[str]:
        """Describe the workers that are not ready, and the lost workers that were not replaced."""
        states = [f"worker {w.id} is {w.state}" for w in self.client.workers if w.state != "ready"]
        return states + [
            f"worker {strike.worker} was not replaced after {strike.kind!r}"
            for strike in self._replaced.values()
        ]

    async def _target(self, drawn: int) -> tuple[sglrl.WorkerInfo, int]:
        """Return a ready worker without a current fault, and a pidfd of its process.

        The worker holds no call that a further fault would make fail: see ``Load.may_strike``.
        """
        async with asyncio.timeout(_PATIENCE):
            while True:
                ready = [w for w in self.client.workers if w.state == "ready"]
                free = [w for w in ready if w.id not in self._disturbed]
                targets = [
                    w
                    for w in free
                    if (self.among is None or w.id in self.among) and self.load.may_strike(w.id)
                ]
                if targets and len(free) > self.spare:
                    target = targets[drawn % len(targets)]
                    with contextlib.suppress(ProcessLookupError):
                        handle = os.pidfd_open(target.pid)
                        self._disturbed.add(target.id)
                        return target, handle
                await asyncio.sleep(_POLL)

    async def _strike(self, fault: Fault, worker: sglrl.WorkerInfo, handle: int) -> None:
        fatal = False
        try:
            # Do not strike a process that has exited meanwhile, for example after a failed update.
            with contextlib.suppress(ProcessLookupError):
                if fault.kind == UPDATE:
                    await self._update(fault, worker, handle)
                else:
                    self._hit(fault.kind, worker, handle)
                fatal = fault.kind in FATAL
                if fault.kind == STOP:
                    await asyncio.sleep(fault.seconds)
                    signal.pidfd_send_signal(handle, signal.SIGCONT)
                elif fault.kind == SLOW:
                    await _slow_down(handle, fault.seconds)
        finally:
            if not fatal:
                self._over(worker.id)
            os.close(handle)

    def _over(self, index: int) -> None:
        self._disturbed.discard(index)
        self._standing.discard(index)

    def _hit(self, kind: str, worker: sglrl.WorkerInfo, handle: int) -> None:
        if kind == DROP:
            shut_connections(worker.pid, handle)
        else:
            signal.pidfd_send_signal(handle, _SIGNALS[kind])
        strike = Strike(kind, worker.id, worker.pid, time.monotonic())
        self.load.struck(strike)
        if kind in STANDING:
            self._standing.add(worker.id)
            for earlier in reversed(self.strikes):
                if strike.at - earlier.at > _AFTERMATH:
                    break
                earlier.alone = False
        strike.alone = not self._standing
        self.strikes.append(strike)
        if kind in FATAL:
            self._replaced[worker.id] = strike
            self._whole.clear()

    async def _update(self, fault: Fault, worker: sglrl.WorkerInfo, handle: int) -> None:
        assert self.update is not None
        update = asyncio.ensure_future(self.update())
        try:
            await asyncio.wait([update], timeout=fault.seconds)
            self._hit(UPDATE, worker, handle)
        finally:
            try:
                await update
                self.updates += 1
            except sglrl.SglrlError as error:
                self.refused[f"{type(error).__name__}: {error}"] += 1

    async def _watch(self) -> None:
        """Record when the replacement of each struck worker is ready, and when all workers are."""
        while True:
            await asyncio.sleep(_POLL)
            workers = self.client.workers
            for worker in workers:
                strike = self._replaced.get(worker.id)
                if strike and worker.state == "ready" and worker.pid != strike.pid:
                    strike.back = time.monotonic() - strike.at
                    del self._replaced[worker.id]
                    self._over(worker.id)
            if not self._replaced and all(worker.state == "ready" for worker in workers):
                self._whole.set()
            else:
                self._whole.clear()


async def _slow_down(handle: int, seconds: float) -> None:
    """Continue and stop a stopped process in turn. In the end, the process runs."""
    until = time.monotonic() + seconds
    while True:
        await asyncio.sleep(_REST)
        signal.pidfd_send_signal(handle, signal.SIGCONT)
        if time.monotonic() > until:
            return
        await asyncio.sleep(_RUN)
        signal.pidfd_send_signal(handle, signal.SIGSTOP)


def shut_connections(pid: int, handle: int) -> None:
    """Shut down a process's connections to the driver in both directions, like a network failure.

    Neither side receives a warning, and messages in transit are lost.

    Args:
        pid: the process.
        handle: a pidfd of the process.

    Raises:
        ProcessLookupError: the process has exited, or has no connection to the driver.
        PermissionError: the system does not allow access to the sockets of another process.
    """
    library = ctypes.CDLL(None, use_errno=True)
    shut = 0
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        raise ProcessLookupError from None
    for entry in descriptors:
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
        except FileNotFoundError:
            continue
        descriptor = library.syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
        if descriptor < 0:
            error = ctypes.get_errno()
            if error in (1, 13, 38):
                raise PermissionError(error, f"pidfd_getfd: {os.strerror(error)}")
            continue
        with socket.socket(fileno=descriptor) as connection, contextlib.suppress(OSError):
            peer = connection.getpeername()
            # The driver's socket is a file in the folder of a pool.
            if isinstance(peer, str) and "/pool-" in peer:
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    if not shut:
        raise ProcessLookupError(f"process {pid} has no connection to its driver")
