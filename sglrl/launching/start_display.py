"""Show the start of a pool on stderr: a status line on a terminal, otherwise one line."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, Self

from ..driver.pool import StartProgress
from ..inference.display import can_redraw

logger = logging.getLogger("sglrl.launch")


class StartDisplay(StartProgress):
    """Shows the start of engine workers.

    Args:
        what: the text for the workers, for example "2 workers of tiny".
        shown: whether to write to stderr. With False, the stages are only logged.
    """

    def __init__(self, what: str, *, shown: bool) -> None:
        self._what = what
        self._shown = shown and sys.stderr is not None
        self._status: Any = None
        self._begun = 0.0

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        if self._shown and can_redraw(sys.stderr):
            from rich.console import Console

            self._status = Console(stderr=True).status(f"starting {self._what}")
            self._status.start()
        elif self._shown:
            # A log file or a notebook cannot redraw a line. Begin a line here, and end it when the
            # workers are ready.
            self._write(f"sglrl: starting {self._what} ... ")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        elif self._shown:
            error = exc[1]
            if error is None:
                self._write(f"ready in {time.monotonic() - self._begun:.1f} s\n")
            else:
                # Ctrl-C cancels the start with an error that is not an ``Exception``.
                self._write("failed\n" if isinstance(error, Exception) else "interrupted\n")

    def show(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        else:
            logger.info("%s", text)

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
