"""Show the progress of a command, and print its result as JSON.

Progress is a live bar on a terminal, and a few lines in a log.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

LINES = 8
"""Number of progress lines for each stage if the output is not a terminal."""

Advance = Callable[[str], None]
"""A function ``advance(note)`` that counts one more part as done and shows the note beside it."""


def is_live(console: Console) -> bool:
    """Return whether the console is a terminal that can redraw a line."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def stage(console: Console, title: str, total: int) -> Iterator[Advance]:
    """Show the progress of ``total`` equal parts while the block runs."""
    if is_live(console):
        # On a narrow terminal, only the note is cut off.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        with Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[note]}", table_column=rest),
            console=console,
            expand=True,
        ) as progress:
            bar = progress.add_task(title, total=total, note="")
            yield lambda note: progress.update(bar, advance=1, note=note)
    else:
        console.print(f"{title}: {total}", highlight=False)
        yield _lines(console, title, total)


@contextmanager
def start_up(console: Console) -> Iterator[None]:
    """Show the progress of ``launch`` while the block runs.

    On a terminal, ``launch`` shows a status line itself. Elsewhere, the log lines of ``launch`` are
    printed.
    """
    if is_live(console):
        yield
        return
    logger, handler = logging.getLogger("sglrl.launch"), _Lines(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Lines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"start: {record.getMessage()}", highlight=False, markup=False)


def _lines(console: Console, title: str, total: int) -> Advance:
    done = 0

    def advance(note: str) -> None:
        nonlocal done
        done += 1
        if done * LINES // total != (done - 1) * LINES // total:
            text = f"{title}: {done} of {total}" + (f", {note}" if note else "")
            console.print(text, highlight=False, soft_wrap=True)

    return advance


def quiet_transformers() -> None:
    """Hide the progress bars and warnings of transformers. Its errors are still raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging as theirs

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()


def quiet_warnings() -> None:
    """Hide the warnings that transformers logs, which users of a command do not need."""
    import logging

    logging.getLogger("transformers").setLevel(logging.ERROR)


def print_json(text: bytes) -> None:
    """Print JSON in UTF-8, whatever the terminal's encoding is."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text + b"\n")
    sys.stdout.flush()
