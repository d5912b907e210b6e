"""Build formats, the parts of XGrammar's structural tags.

See https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeAlias

Format: TypeAlias = dict[str, Any]
"""A part of a structural tag."""


def sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


def optional(elements: list[Format]) -> list[Format]:
    """Return a list with a format that allows the given formats in order, or an empty text.

    Without formats, the list is empty.
    """
    return [{"type": "optional", "content": sequence(elements)}] if elements else []


def literal(text: str, tokens: Mapping[str, int]) -> list[Format]:
    """Return the formats of a text that may contain special tokens.

    A parser finds calls by special tokens such as ``<tool_call>``. So the format requires the
    special token itself, and does not allow other tokens with the same characters.
    """
    longest_first = sorted(tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if tokens else [text]
    return [
        {"type": "token", "token": tokens[part]}
        if part in tokens
        else {"type": "const_string", "value": part}
        for part in parts
        if part
    ]


def either(formats: list[Format]) -> Format:
    """Return a format that allows any one of the given formats."""
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def exactly(text: str) -> Format:
    """Return the format of a text, which may be empty."""
    if not text:
        return {"type": "grammar", "grammar": 'root ::= ""\n'}
    return {"type": "const_string", "value": text}
