"""The beat of a worker: a thread with a socket of its own says, again and again, how far the
process's loop has come. What follows from that is the driver's to decide (``sglrl.core.hangs``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sglrl.transport.zmq import ZmqPolledDealer
from sglrl.wire.calls import Heartbeat, heartbeat_identity
from sglrl.wire.codec import encode
from sglrl.wire.processes import WorkerSpec


def start_beats(spec: WorkerSpec, look: Callable[[], Heartbeat]) -> None:
    """Until the process ends. ``look`` is called on the beat's own thread, and must not wait."""
    if spec.heartbeat_interval is not None:
        threading.Thread(
            target=_send_beats,
            args=(spec, spec.heartbeat_interval, look),
            name="sglrl-beat",
            daemon=True,
        ).start()


def _send_beats(spec: WorkerSpec, interval: float, look: Callable[[], Heartbeat]) -> None:
    dealer = ZmqPolledDealer(
        spec.address,
        heartbeat_identity(spec.identity),
        max_message_bytes=spec.max_message_bytes,
        keys=spec.keys,
        heartbeat_timeout=spec.heartbeat_timeout,
    )
    while True:
        dealer.send([encode(look())])
        time.sleep(interval)
