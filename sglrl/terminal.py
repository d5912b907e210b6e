"""Whether a stream is a terminal that can redraw a line."""

from __future__ import annotations

import os
from typing import TextIO


def can_redraw(stream: TextIO | None) -> bool:
    """Return False for a file, a pipe, no stream at all, and a terminal without cursor control.

    Such a terminal has ``TERM=dumb``, for example in Emacs. Progress is printed there in lines.
    """
    if stream is None or not stream.isatty():
        return False
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
