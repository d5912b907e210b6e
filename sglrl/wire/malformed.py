"""Say in plain words why text is not JSON."""

from __future__ import annotations

from .codec import Buffer

_TRUNCATED = "Input data was truncated"


def malformed(error: Exception, data: Buffer | str) -> str:
    """Return what is wrong with JSON, or with msgpack.

    Args:
        error: of msgspec, when it decoded ``data``.
    """
    text = str(error)
    if text != _TRUNCATED:
        return text
    size = len(data)
    blank = not (data if isinstance(data, str) else bytes(data)).strip()
    return "it is empty" if blank else f"it ends in the middle, after {size:,} bytes"
