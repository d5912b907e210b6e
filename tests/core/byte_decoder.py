"""Tokenizers with a few tokens. Like real ones, they split text in the middle of characters."""

from __future__ import annotations

from collections.abc import Sequence

SPECIAL = 300
"""A special token, shown as ``<end>`` unless special tokens are skipped."""

PIECES = 400
"""Tokens from here on are whole words of a decoder that drops the space before the first word."""


def decode_bytes(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Decode tokens 0 to 255 as bytes, like byte-level BPE.

    Incomplete characters become U+FFFD.
    """
    data = bytearray()
    for token in ids:
        if token == SPECIAL:
            data += b"" if skip_special_tokens else b"<end>"
        else:
            data.append(token)
    return data.decode(errors="replace")


def decode_words(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Decode tokens from ``PIECES`` on as words with a space in front, like sentencepiece."""
    text = ""
    for token in ids:
        if token == SPECIAL:
            text += "" if skip_special_tokens else "<end>"
        else:
            text += f" {chr(ord('a') + token - PIECES)}"
    return text.removeprefix(" ")
