"""What peers sent in vain."""

from __future__ import annotations

import logging


class Dropped:
    """Counts, and logs the 1st, 2nd, 4th, 8th, ...: a peer that floods us does not fill the log."""

    def __init__(self, logger: logging.Logger) -> None:
        self.count = 0
        self._logger = logger

    def __call__(self, reason: str, *args: object) -> None:
        """``reason % args`` is put together only when it is logged."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            self._logger.warning(f"{reason} (dropped; %d so far)", *args, self.count)
