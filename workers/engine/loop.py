"""The scheduler loop for engines without their own loop."""

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
    """An engine whose steps the loop calls.

    Attributes:
        mailbox: the engine's answers go there.
    """

    mailbox: Mailbox
    request_steps: int
    """Number of requests in all steps: each request counts once in each of its steps."""

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
        """The phase for heartbeats: "", or one of ``core.hangs``."""
        ...

    def between_steps(self) -> None:
        """Do what other threads have asked for. This may block during a weight update."""
        ...

    def step(self) -> None:
        """Advance all running requests. This blocks for one step at most."""
        ...


def run_engine(spec: WorkerSpec, body: EngineSpec, engine: SteppingEngine) -> None:
    """Serve until ``Shutdown``."""
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
