"""Exit a worker whose connection to the driver breaks."""

from __future__ import annotations

import os
import sys


def leave() -> None:
    """Exit the process. Any thread may call this.

    The messages in transit are lost, and neither side knows which ones. A new connection would
    continue after a gap. The driver notices the exit, and other workers resume the calls from the
    tokens that the driver has received.
    """
    sys.stderr.write("the connection to the driver broke; this worker ends\n")
    sys.stderr.flush()
    os._exit(1)
