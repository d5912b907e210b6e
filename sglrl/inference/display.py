"""Show texts in ``repr`` and in notebooks, and detect terminals that can redraw a line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from typing import Final, TextIO

_PREVIEW: Final = 60
"""The maximum number of characters of a text in a ``repr``."""
_STYLES: Final = {
    "prompt": "opacity: 0.6",
    "sampled": "background: rgba(64, 160, 255, 0.18)",
    "observed": "background: rgba(160, 160, 160, 0.18)",
}


def preview(text: str) -> str:
    """Return the ``repr`` of a text. A long text is shortened."""
    if len(text) > _PREVIEW:
        text = f"{text[: _PREVIEW - 3]}..."
    return repr(text)


def html(title: str, parts: Iterable[tuple[str, str]]) -> str:
    """Return the HTML with which a notebook shows an object.

    Args:
        title: one line about the object.
        parts: pairs of a kind ("prompt", "sampled" or "observed") and a text, in order.
    """
    spans = [f'<span style="{_STYLES[kind]}">{escape(text)}</span>' for kind, text in parts]
    return (
        f"<div><small>{escape(title)}</small>"
        f'<pre style="white-space: pre-wrap; margin: 0">{"".join(spans)}</pre></div>'
    )


def can_redraw(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal that can redraw a line.

    Return False for files, pipes, None, and terminals without cursor control (``TERM=dumb``, for
    example in Emacs). There, callers print each report of progress as a line of its own.
    """
    if stream is None or not stream.isatty():
        return False
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
