"""Draw kind, target and time of each fault from a seed, so that a run can be repeated.

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

BLINK = "blink"
"""The link of a host is down for less than the heartbeat timeout."""
AWAY = "away"
"""The link is down for longer. The workers return."""
INWARD = "inward"
"""The packets to the host are lost for a while."""
OUTWARD = "outward"
"""The packets from the host are lost for a while."""
GONE = "gone"
"""The link is down for longer than the orphan timeout. The workers are replaced."""
WORKER = "worker"
"""SIGKILL to a worker of the host."""
NODE = "node"
"""SIGKILL to a node, which starts again."""
TWO = "two"
"""SIGKILL to two nodes at once, which start again."""
DRIVER = "driver"
"""The program with the calls is stopped."""

HOST_SHARES: Mapping[str, float] = {
    BLINK: 5,
    AWAY: 5,
    INWARD: 2,
    OUTWARD: 2,
    GONE: 1,
    WORKER: 5,
    NODE: 3,
    TWO: 1,
    DRIVER: 1,
}
"""Relative frequency of each kind of fault of a host."""
BURST = 0.2
"""Share of faults of workers that happen together with the previous fault."""
_SECONDS = {
    STOP: (0.05, 0.8),
    SLOW: (0.2, 1.0),
    UPDATE: (0.0, 0.08),
    BLINK: (0.2, 2.0),
    AWAY: (5.0, 9.0),
    INWARD: (5.0, 9.0),
    OUTWARD: (5.0, 9.0),
    GONE: (22.0, 30.0),
    NODE: (0.5, 3.0),
    TWO: (0.5, 3.0),
    DRIVER: (2.0, 20.0),
}


class Fault(NamedTuple):
    """One fault.

    Attributes:
        gap: seconds after the previous fault.
        target: a random number. Take it modulo the number of workers or hosts that can be struck.
        seconds: how long the fault lasts. For UPDATE: seconds until the worker is killed.
    """

    kind: str
    gap: float
    target: int
    seconds: float


def schedule(
    seed: int, count: int, gap: float, shares: Mapping[str, float], burst: float = 0.0
) -> list[Fault]:
    """Return ``count`` faults, ``gap`` seconds apart on average, in proportion to ``shares``.

    Args:
        burst: share of faults that happen together with the previous fault.
    """
    draw = random.Random(seed)
    kinds = draw.choices(list(shares), list(shares.values()), k=count)
    return [
        Fault(
            kind,
            0.0 if burst and draw.random() < burst else draw.expovariate((1 - burst) / gap),
            draw.randrange(1 << 30),
            draw.uniform(*_SECONDS.get(kind, (0.0, 0.0))),
        )
        for kind in kinds
    ]
