"""``python -m sglrl`` and the ``sglrl`` command."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence

from .config import open_standard_files

INTERRUPTED = 130
"""The exit code shells give a program that SIGINT ended."""


def main(arguments: Sequence[str] | None = None, name: str = "sglrl") -> None:
    """Run a command and exit. A Ctrl-C, whenever it comes, is one line and no traceback."""
    code: object = 0
    open_standard_files()
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal has no letter for is no reason to lose an answer.
            stream.reconfigure(errors="backslashreplace")
    try:
        from .tools.cli import app

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
