"""What a worker does when its connection to the driver breaks.

The messages in transit are lost, and neither side knows which ones. A worker on the driver's
machine exits: the driver notices, and other workers resume its calls from the tokens that the
driver has received. A worker on another host may return: it connects again, ends all its calls, and
tells the driver that it is ready (see ``Mailbox`` and ``actor_worker.Host``).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

RECONNECT_SECONDS: Final = 3.0
"""Seconds until ZeroMQ reconnects without the worker. It would then send the messages that wait,
although earlier ones were lost. The worker must replace the socket before."""
_PAUSE: Final = 0.5
"""Seconds between a break and the next connection, so that a driver which refuses connections is
not asked too often."""
_REACT_SECONDS: Final = 2.0
"""Seconds that a worker has to replace the socket. Together with the pause they are less than
``RECONNECT_SECONDS``."""


class BreakWatch:
    """The ``on_break`` of one socket. It runs on the socket's own thread.

    Args:
        returns: whether the worker may return. Otherwise it exits.
        tell: tells the worker to replace the socket. If it is too busy, it exits.
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
