"""Count and log dropped messages."""

from __future__ import annotations

import logging


class Dropped:
    """Counts dropped messages, and logs only the 1st, 2nd, 4th, 8th and so on.

    Thus a peer that sends many bad messages does not fill the log.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.count = 0
        self._logger = logger

    def __call__(self, reason: str, *args: object) -> None:
        """Count one message. ``reason % args`` is computed only for a message that is logged."""
        self.count += 1
        if self.count & (self.count - 1) == 0:
            self._logger.warning(f"{reason} (dropped; %d so far)", *args, self.count)
