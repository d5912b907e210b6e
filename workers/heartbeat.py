"""Heartbeats of a worker: a thread reports the progress of the process's loop on its own socket.

The driver decides what they mean (``sglrl.core.hangs``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.wire.calls import Heartbeat, heartbeat_identity
from sglrl.wire.codec import encode
from sglrl.wire.processes import WorkerSpec


def start_heartbeats(spec: WorkerSpec, next_heartbeat: Callable[[], Heartbeat]) -> None:
    """Send heartbeats until the process ends.

    Args:
        next_heartbeat: runs on the heartbeat's thread, and must not block.
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
