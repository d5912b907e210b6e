"""Run the command line: ``python -m sglrl`` and the ``sglrl`` command."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence

from .transport.system_limits import open_standard_files

INTERRUPTED = 130
"""The exit code that shells report for a program killed by SIGINT."""


def main(arguments: Sequence[str] | None = None, name: str = "sglrl") -> None:
    """Run a command and exit. Ctrl-C at any time prints one line and no traceback."""
    code: object = 0
    open_standard_files()
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot encode must not lose an answer.
            stream.reconfigure(errors="backslashreplace")
    try:
        from .tools.cli import app

        app(arguments, prog_name=name)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as exit_:
        code = exit_.code
    if code == INTERRUPTED:
        # Worker processes are stopped at interpreter exit. A second Ctrl-C must not interrupt that.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("interrupted\n")
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
