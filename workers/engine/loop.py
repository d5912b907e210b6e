"""The scheduler loop of engines that have none of their own."""

from __future__ import annotations

from typing import Protocol

from sglrl.core.hangs import PAUSED
from sglrl.wire.calls import Heartbeat
from sglrl.wire.processes import EngineSpec, WorkerSpec

from ..heartbeat import start_heartbeats
from ..mailbox import Mailbox
from .protocol import Engine

IDLE_WAIT = 10.0
"""Seconds an idle loop blocks before it looks around; a message ends the wait at once."""


class SteppingEngine(Engine, Protocol):
    """An engine that is driven step by step."""

    mailbox: Mailbox
    paused: bool

    @property
    def busy(self) -> bool: ...

    def step(self) -> None:
        """Advance all running requests; blocks at most for the time of one step."""
        ...


def run_engine(spec: WorkerSpec, body: EngineSpec, engine: SteppingEngine) -> None:
    """Serve until ``Shutdown``."""
    mailbox = engine.mailbox = Mailbox(spec)
    mailbox.starting("fake engine")
    start_heartbeats(spec, lambda: Heartbeat(mailbox.progress, PAUSED if engine.paused else ""))
    mailbox.ready(body.window, engine.info())
    while not mailbox.stopped:
        mailbox.receive(engine)
        if engine.busy:
            engine.step()
        stats = engine.stats()
        mailbox.flush(stats.kv_usage, stats.waiting)
        if not engine.busy:
            mailbox.wait(IDLE_WAIT)
    mailbox.close()
