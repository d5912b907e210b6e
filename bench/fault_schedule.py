"""Draw kind, worker and time of each fault from a seed, so that a run can be repeated.

A run keeps these times as well as the machine allows. Two runs of one seed still differ, because
the processes race each other. The bench is made to test these races.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

KILL = "kill"
"""SIGKILL."""
STOP = "stop"
"""SIGSTOP, then SIGCONT before the driver treats the worker as dead."""
HANG = "hang"
"""SIGSTOP without SIGCONT. The driver has to detect and kill the worker."""
DROP = "drop"
"""The worker's connections to the driver are shut down while it runs."""
SLOW = "slow"
"""The worker is stopped and continued in turn, so that it does a fraction of its work."""
UPDATE = "update"
"""A weight update begins, and the worker is killed in the middle of it."""

FATAL = (KILL, HANG, DROP, UPDATE)
"""Faults after which the worker has to be replaced."""
STANDING = (STOP, HANG, SLOW)
"""Faults during which the worker keeps its calls and gets more, but does little or no work."""

_BURST = 0.2
"""Share of faults that happen together with the previous fault."""
_SECONDS = {STOP: (0.05, 0.8), SLOW: (0.2, 1.0), UPDATE: (0.0, 0.08)}


class Fault(NamedTuple):
    """One fault.

    Attributes:
        gap: seconds after the previous fault.
        worker: a random number. Take it modulo the number of workers that can be struck.
        seconds: how long the fault lasts. For UPDATE: seconds until the worker is killed.
    """

    kind: str
    gap: float
    worker: int
    seconds: float


def schedule(seed: int, count: int, gap: float, shares: Mapping[str, float]) -> list[Fault]:
    """Return ``count`` faults, ``gap`` seconds apart on average, in proportion to ``shares``."""
    draw = random.Random(seed)
    kinds = draw.choices(list(shares), list(shares.values()), k=count)
    return [
        Fault(
            kind,
            0.0 if draw.random() < _BURST else draw.expovariate((1 - _BURST) / gap),
            draw.randrange(1 << 30),
            draw.uniform(*_SECONDS.get(kind, (0.0, 0.0))),
        )
        for kind in kinds
    ]
