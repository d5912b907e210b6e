"""Show texts in ``repr`` and notebooks, what a terminal can show, and stages that take long."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from html import escape
from typing import Final, TextIO

logger = logging.getLogger("sglrl.launch")

SLOW_SECONDS: float = 1.0
"""A stage that takes longer is shown."""
_PREVIEW: Final = 60
"""Characters of a text in a ``repr``."""
_STYLES: Final = {
    "prompt": "opacity: 0.6",
    "sampled": "background: rgba(64, 160, 255, 0.18)",
    "observed": "background: rgba(160, 160, 160, 0.18)",
}


def preview(text: str) -> str:
    """Return the ``repr`` of a text, cut to a line."""
    if len(text) > _PREVIEW:
        text = f"{text[: _PREVIEW - 3]}..."
    return repr(text)


def html(title: str, parts: Iterable[tuple[str, str]]) -> str:
    """Return HTML for a notebook.

    Args:
        title: one line about the object.
        parts: texts in order, each with its kind: "prompt", "sampled" or "observed".
    """
    spans = [f'<span style="{_STYLES[kind]}">{escape(text)}</span>' for kind, text in parts]
    return (
        f"<div><small>{escape(title)}</small>"
        f'<pre style="white-space: pre-wrap; margin: 0">{"".join(spans)}</pre></div>'
    )


def can_redraw(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that can redraw a line.

    Files, pipes, no stream at all, and terminals without cursor control give False. Such a terminal
    has ``TERM=dumb``, for example in Emacs. Progress is printed there in lines.
    """
    if stream is None or not stream.isatty():
        return False
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@asynccontextmanager
async def shown_if_slow(what: str, *, shown: bool) -> AsyncIterator[None]:
    """Write a line about the work in the block to stderr if it takes longer than a second.

    Args:
        shown: False: log the line instead.
    """

    def show() -> None:
        if shown and sys.stderr is not None:
            sys.stderr.write(f"sglrl: {what} ...\n")
            sys.stderr.flush()
        else:
            logger.info("%s", what)

    timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, show)
    try:
        yield
    finally:
        timer.cancel()
