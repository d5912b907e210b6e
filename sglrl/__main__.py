"""``python -m sglrl`` and the ``sglrl`` command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

INTERRUPTED = 130
"""The exit code shells give a program that SIGINT ended."""


def main(arguments: Sequence[str] | None = None, name: str = "sglrl") -> None:
    """Run a command and exit. A Ctrl-C, whenever it comes, is one line and no traceback."""
    code: object = 0
    try:
        from .cli import app

        app(arguments, prog_name=name)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as exit_:
        code = exit_.code
    if code == INTERRUPTED:
        # Worker processes are ended at interpreter exit; a second Ctrl-C must not cut that short.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("interrupted\n")
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
