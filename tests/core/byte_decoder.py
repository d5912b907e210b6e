"""Tokenizers of a few tokens, which break text as the real ones do: in the middle of characters."""

from __future__ import annotations

from collections.abc import Sequence

SPECIAL = 300
"""A special token, shown as ``<end>`` unless special tokens are skipped."""

PIECES = 400
"""From here on: whole words of a decoder that drops the space in front of the first word."""


def decode_bytes(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Tokens 0 to 255 are bytes, as in byte-level BPE; incomplete characters become U+FFFD."""
    data = bytearray()
    for token in ids:
        if token == SPECIAL:
            data += b"" if skip_special_tokens else b"<end>"
        else:
            data.append(token)
    return data.decode(errors="replace")


def decode_words(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Tokens from ``PIECES`` on are words with a space in front, as sentencepiece writes them."""
    text = ""
    for token in ids:
        if token == SPECIAL:
            text += "" if skip_special_tokens else "<end>"
        else:
            text += f" {chr(ord('a') + token - PIECES)}"
    return text.removeprefix(" ")
