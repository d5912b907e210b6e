"""Find workers that hang, log their stacks, and kill them.

Workers send heartbeats from separate sockets (``sglrl_workers.heartbeat``). ``core.hangs`` decides
which workers hang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ..core.driver_listener import DriverListener
from ..core.hangs import HangDetector
from ..errors import ProtocolError
from ..wire.calls import heartbeat_identity
from ..wire.codec import Buffer, decode_heartbeat
from .driver import Driver

logger = logging.getLogger("sglrl.spawn")

DUMP_SECONDS: Final = 0.5
"""Seconds that a hanging process may take to write its stacks. A stopped process writes none."""
_LARGEST_DUMP: Final = 256 << 10


class HangMonitor(DriverListener):
    """Watches the workers of one driver and kills workers that hang.

    Args:
        driver: the driver of the workers.
        timeout: seconds without progress after which a worker counts as hung. None: never.
        dump: ``dump(worker)`` asks the worker's processes to write their stacks. It returns the log
            that they write to, and the byte offset at which the stacks begin.
        expel: ``expel(worker, reason)`` kills the worker's processes.
    """

    def __init__(
        self,
        driver: Driver,
        timeout: float | None,
        dump: Callable[[int], tuple[Path, int]],
        expel: Callable[[int, str], None],
    ) -> None:
        self._driver = driver
        self._dump = dump
        self._expel = expel
        self._workers: dict[bytes, int] = {}
        self._identities: dict[int, bytes] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._dumps: dict[int, asyncio.TimerHandle] = {}
        self._detector: HangDetector | None = None
        if timeout is not None:
            self._detector = HangDetector(timeout, time.monotonic())
            driver.add_listener(self)
            self._set_timer(self._detector.interval)

    @property
    def heartbeat_interval(self) -> float | None:
        """Seconds between two heartbeats of a worker. None: workers send no heartbeats."""
        return None if self._detector is None else self._detector.interval

    def watch(self, worker: int, identity: bytes) -> None:
        """Watch a new process of this worker instead of the previous process, if any."""
        if self._detector is None:
            return
        self._forget(worker)
        self._identities[worker] = heartbeat_identity(identity)
        self._workers[self._identities[worker]] = worker
        self._detector.watch(worker, time.monotonic())

    def silence(self, worker: int) -> float | None:
        """Return the seconds since a worker's last sign of life. None if it is not watched."""
        if self._detector is None:
            return None
        return self._detector.silence(worker, time.monotonic())

    def close(self) -> None:
        for timer in (self._timer, *self._dumps.values()):
            if timer is not None:
                timer.cancel()
        self._timer = None
        self._dumps.clear()

    # --- events -----------------------------------------------------------------------------------

    def on_peer(self, identity: bytes, frames: Sequence[Buffer]) -> bool:
        worker = self._workers.get(identity)
        if worker is None or self._detector is None:
            return False
        try:
            heartbeat = decode_heartbeat(frames[0])
        except ProtocolError:
            return False
        self._detector.heartbeat(worker, heartbeat.progress, heartbeat.phase, time.monotonic())
        return True

    def _set_timer(self, interval: float) -> None:
        self._timer = self._loop.call_later(interval, self._check, interval)

    def _check(self, interval: float) -> None:
        assert self._detector is not None
        self._set_timer(interval)
        loads = {index: member.load for index, member in self._driver.fabric.members.items()}
        for worker, reason in self._detector.check(loads, time.monotonic()).items():
            log, begin = self._dump(worker)
            self._dumps[worker] = self._loop.call_later(
                DUMP_SECONDS, self._end, worker, reason, log, begin
            )

    def _end(self, worker: int, reason: str, log: Path, begin: int) -> None:
        self._forget(worker)
        stacks = read_stacks(log, begin) or "(no process of it wrote any)"
        logger.error("worker %d hangs: %s; its stacks:\n%s", worker, reason, stacks)
        self._expel(worker, reason)

    def _forget(self, worker: int) -> None:
        """Delete the state of the worker's previous process."""
        self._workers.pop(self._identities.pop(worker, b""), None)
        timer = self._dumps.pop(worker, None)
        if timer is not None:
            timer.cancel()


def read_stacks(log: Path, begin: int) -> str:
    """Return what a worker has written to its log after the byte ``begin``."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read(_LARGEST_DUMP).decode(errors="replace")
    except OSError:
        return ""
