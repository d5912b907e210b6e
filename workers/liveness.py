"""How the driver and its workers detect each other's exit: heartbeats and broken connections.

A thread of each worker reports the progress of the worker's loop on a separate socket. The driver
decides what the heartbeats mean (``sglrl.core.hangs``).

When a connection breaks, the messages in transit are lost, and neither side can find out which
ones. A worker on the driver's machine exits. The driver notices the exit, and other workers resume
the calls from the tokens that the driver has received. A worker on another host may return: it
connects again, ends all its calls, and reports to the driver that it is ready (see ``Mailbox`` and
``actor_worker.Host``).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.wire.calls import Heartbeat, heartbeat_identity
from sglrl.wire.codec import encode
from sglrl.wire.processes import WorkerSpec

RECONNECT_SECONDS: Final = 3.0
"""Seconds until ZeroMQ reconnects by itself. The worker must replace the socket earlier, because a
reconnected socket sends the waiting messages, although earlier messages were lost."""
_PAUSE: Final = 0.5
"""Seconds between a break and the next connection. The pause keeps a worker from connecting too
often to a driver that refuses connections."""
_REACT_SECONDS: Final = 2.0
"""Seconds that a worker has to replace the socket. The sum of ``_PAUSE`` and this time is less than
``RECONNECT_SECONDS``."""


def start_heartbeats(spec: WorkerSpec, next_heartbeat: Callable[[], Heartbeat]) -> None:
    """Send heartbeats until the process ends.

    Args:
        next_heartbeat: returns the next heartbeat. It runs on the heartbeat thread and must not
            block.
    """
    if spec.heartbeat_interval is not None:
        threading.Thread(
            target=_send_heartbeats,
            args=(spec, spec.heartbeat_interval, next_heartbeat),
            name="sglrl-heartbeat",
            daemon=True,
        ).start()


def _send_heartbeats(
    spec: WorkerSpec, interval: float, next_heartbeat: Callable[[], Heartbeat]
) -> None:
    dealer = ZmqPolledDealer(
        spec.address,
        heartbeat_identity(spec.identity),
        max_message_bytes=spec.max_message_bytes,
        keys=spec.keys,
        heartbeat_timeout=spec.heartbeat_timeout,
    )
    while True:
        dealer.send([encode(next_heartbeat())])
        time.sleep(interval)


class BreakWatch:
    """The ``on_break`` callback of one socket. It runs on the socket's own thread.

    Args:
        returns: whether the worker may connect again. If false, a break ends the process.
        tell: requests that the worker replace the socket. The process exits if this takes too long.
    """

    def __init__(self, returns: bool, tell: Callable[[], None]) -> None:
        self._returns = returns
        self._tell = tell
        self._handled = threading.Event()

    def __call__(self) -> None:
        if self._returns:
            if self._handled.wait(_PAUSE):
                return
            self._tell()
            if self._handled.wait(_REACT_SECONDS):
                return
        sys.stderr.write("the connection to the driver broke; this worker ends\n")
        sys.stderr.flush()
        os._exit(1)

    def handled(self) -> None:
        """Record that the worker is about to close the socket."""
        self._handled.set()
