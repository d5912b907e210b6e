"""Which faults are to happen, to whom and when: drawn from a seed, so that a run can be repeated.

The times are kept as well as the machine can; whatever else differs between two runs of one seed
does so because the processes race each other, which is the point.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

KILL = "kill"
"""SIGKILL."""
STOP = "stop"
"""SIGSTOP, and SIGCONT before anybody takes the worker for dead."""
HANG = "hang"
"""SIGSTOP for good: the driver has to find out and to end it."""
DROP = "drop"
"""Its connections to the driver are shut down, while it runs."""
SLOW = "slow"
"""Stopped and continued in turn, so that it does a fraction of its work."""
UPDATE = "update"
"""A weight update begins and the worker is killed in the middle of it."""

FATAL = (KILL, HANG, DROP, UPDATE)
"""The worker has to be replaced."""
STANDING = (STOP, HANG, SLOW)
"""The worker keeps its calls, and gets more of them, while it does nothing or little."""

_BURST = 0.2
"""Share of faults that come together with the one before."""
_SECONDS = {STOP: (0.05, 0.8), SLOW: (0.2, 1.0), UPDATE: (0.0, 0.08)}


class Fault(NamedTuple):
    """One fault. ``gap``: seconds after the fault before; ``worker``: a draw, to be taken modulo
    the number of workers that can be struck then; ``seconds``: how long it lasts, or for UPDATE
    when the worker is killed."""

    kind: str
    gap: float
    worker: int
    seconds: float


def schedule(seed: int, count: int, gap: float, shares: Mapping[str, float]) -> list[Fault]:
    """``count`` faults, ``gap`` seconds apart on average, of kinds in proportion to ``shares``."""
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
