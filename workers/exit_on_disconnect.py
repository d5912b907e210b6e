"""A worker whose connection to the driver breaks must end."""

from __future__ import annotations

import os
import sys


def leave() -> None:
    """End the process, from whatever thread. What was on its way is lost and neither side can tell
    what it was; a connection made anew would go on behind a gap. The driver hears of the end, and
    gives the calls to others from what it has received."""
    sys.stderr.write("the connection to the driver broke; this worker ends\n")
    sys.stderr.flush()
    os._exit(1)
