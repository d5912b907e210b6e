"""Draw kind, target and time of each fault from a seed, so that a run can be repeated.

A run keeps these times as well as the machine allows. Two runs with the same seed still differ,
because the processes race each other. The bench tests these races.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

KILL = "kill"
"""The worker receives SIGKILL."""
STOP = "stop"
"""The worker receives SIGSTOP, and SIGCONT before the driver treats it as dead."""
HANG = "hang"
"""The worker receives SIGSTOP and no SIGCONT. The driver has to detect the worker and kill it."""
DROP = "drop"
"""The worker's connections to the driver are shut down while it runs."""
SLOW = "slow"
"""The worker is stopped and continued in turn, so that it does a fraction of its work."""
UPDATE = "update"
"""A weight update begins, and the worker is killed in the middle of it."""

FATAL = (KILL, HANG, DROP, UPDATE)
"""Faults after which the worker has to be replaced."""
STANDING = (STOP, HANG, SLOW)
"""Faults during which the worker keeps its calls and receives more, but does little or no work."""

BLINK = "blink"
"""The link of a host is down for less than the heartbeat timeout."""
AWAY = "away"
"""The link is down for longer than the heartbeat timeout. The workers return."""
INWARD = "inward"
"""The packets to the host are lost for a while."""
OUTWARD = "outward"
"""The packets from the host are lost for a while."""
GONE = "gone"
"""The link is down for longer than the orphan timeout. The workers are replaced."""
WORKER = "worker"
"""A worker of the host receives SIGKILL."""
NODE = "node"
"""The node of the host receives SIGKILL, and starts again."""
TWO = "two"
"""The nodes of two hosts receive SIGKILL at once, and start again."""
DRIVER = "driver"
"""The program that makes the calls is stopped for a while."""

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
"""The share of faults of workers that happen together with the previous fault."""
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
        gap: seconds from the previous fault to this fault.
        target: a random number. Modulo the number of workers or hosts that may be struck, it
            selects one of them.
        seconds: duration of the fault. For UPDATE: seconds until the worker is killed.
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
        seed: the seed of the random numbers.
        count: number of faults.
        gap: average seconds between faults.
        shares: relative frequency of each kind of fault.
        burst: the share of faults that happen together with the previous fault.
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
