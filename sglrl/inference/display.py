"""Show texts in ``repr`` and notebooks, and tell what a terminal can show."""

from __future__ import annotations

import os
from collections.abc import Iterable
from html import escape
from typing import Final, TextIO

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
