"""The scheduler loop of an engine that has no loop of its own, such as the fake engine."""

from __future__ import annotations

import time
from typing import Protocol

from sglrl.wire.calls import Heartbeat, Load
from sglrl.wire.engine import EngineStats
from sglrl.wire.processes import EngineSpec, WorkerSpec

from ..liveness import start_heartbeats
from ..mailbox import Mailbox
from .protocol import Engine
from .speed import StepClock

IDLE_WAIT = 10.0
"""Maximum seconds that an idle loop blocks. A message ends the wait at once."""


class SteppingEngine(Engine, Protocol):
    """An engine that ``run_engine`` steps.

    Attributes:
        mailbox: the connection to the driver, which sends the engine's answers.
    """

    mailbox: Mailbox
    request_steps: int
    """The sum of the number of running requests over all steps."""

    def stats(self) -> EngineStats:
        """Return the engine's load and counters."""
        ...

    @property
    def paused(self) -> bool:
        """True if the engine makes no steps, because it is paused or asleep."""
        ...

    @property
    def busy(self) -> bool:
        """True if the engine has requests to compute and is not paused."""
        ...

    @property
    def phase(self) -> str:
        """The phase for heartbeats: "", or a phase of ``core.hangs``."""
        ...

    def between_steps(self) -> None:
        """Do the work that other threads have requested. A weight update may block this."""
        ...

    def step(self) -> None:
        """Advance all running requests by one step. This blocks for at most one step."""
        ...


def run_engine(spec: WorkerSpec, body: EngineSpec, engine: SteppingEngine) -> None:
    """Connect to the driver, and run the engine until ``Shutdown``."""
    mailbox = engine.mailbox = Mailbox(spec)
    mailbox.starting("fake engine")
    start_heartbeats(spec, lambda: Heartbeat(mailbox.progress, engine.phase))
    mailbox.ready(body.window, engine.info())
    steps = StepClock()
    while not mailbox.stopped:
        mailbox.receive(engine)
        engine.between_steps()
        if engine.busy:
            begun = time.monotonic()
            engine.step()
            steps.add(time.monotonic() - begun)
        stats = engine.stats()
        mailbox.flush(
            Load(stats.kv_usage, stats.waiting, 0, steps.mean, steps.shortest, engine.request_steps)
        )
        if not engine.busy:
            mailbox.wait(IDLE_WAIT)
    mailbox.close()
