"""``python -m bench.switch DELAY LOSS FILE...``: an Ethernet switch that delays and loses frames.

Each FILE is the inherited descriptor of a TAP interface. DELAY is in seconds, and LOSS is a share
of the frames. The switch replaces netem, which many kernels lack.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import selectors
import sys
import time

_MAX_BYTES = 65_536
"""Size of the largest frame."""


def serve(delay: float, loss: float, files: list[int]) -> None:
    """Forward frames until the process is killed."""
    draw = random.Random(0)
    selector = selectors.DefaultSelector()
    for file in files:
        selector.register(file, selectors.EVENT_READ)
    ports: dict[bytes, int] = {}
    """For each hardware address that has sent a frame, the file of its interface."""
    waiting: list[tuple[float, int, int, bytes]] = []
    """A heap of frames: time of delivery, a number that keeps the order, source file, frame."""
    count = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(timeout):
            try:
                frame = os.read(key.fd, _MAX_BYTES)
            except OSError:
                # The interface was removed with its namespace.
                selector.unregister(key.fd)
                continue
            if draw.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay, count, key.fd, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, source, frame = heapq.heappop(waiting)
            target, ports[frame[6:12]] = frame[:6], source
            # The lowest bit of the first byte marks broadcast and multicast.
            to = files if target[0] & 1 else [ports[target]] if target in ports else []
            for file in to:
                if file != source:
                    # The interface may be down, or its queue may be full.
                    with contextlib.suppress(OSError):
                        os.write(file, frame)


if __name__ == "__main__":
    serve(float(sys.argv[1]), float(sys.argv[2]), [int(file) for file in sys.argv[3:]])
