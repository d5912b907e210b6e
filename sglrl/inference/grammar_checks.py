"""Check the text of a grammar before it reaches an engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import InvalidRequest
from ..wire.codec import malformed
from .engine_grammar import engine_grammar
from .tokens import check_text


def check_grammar(name: str, text: str) -> None:
    """Raise ``InvalidRequest`` for a grammar that would crash an engine, or promise too much.

    XGrammar crashes on some text that is not JSON, on JSON so deep that it overflows the stack, and
    on a NUL in a regular expression. A JSON schema may have only keywords that can be enforced.
    The engine itself checks everything else.
    """
    if name in ("regex", "ebnf"):
        check_text(name, text)
        _check_nul(name, text)
        return
    try:
        decoded = msgspec.json.decode(text)
        patterns = [*_patterns(decoded)] if "\\u0000" in text else []
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {malformed(error, text)}") from None
    for pattern in patterns:
        _check_nul(f"a pattern in {name}", pattern)
    engine_grammar(name, text)


def _patterns(value: Any) -> Iterator[str]:
    """Yield the regular expressions in a schema or structural tag."""
    if isinstance(value, dict):
        pattern = value.get("pattern")
        if isinstance(pattern, str):
            yield pattern
        patterns = value.get("patternProperties")
        if isinstance(patterns, dict):
            yield from patterns
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            yield from _patterns(part)


def _check_nul(name: str, pattern: str) -> None:
    """Raise ``InvalidRequest`` if a pattern contains a NUL.

    XGrammar (0.2.1, 0.2.7) ignores the text after a NUL. If no text is before the NUL, XGrammar
    reads invalid memory, which crashes the worker.
    """
    if "\0" in pattern:
        raise InvalidRequest(f"{name} holds a NUL character; write it as \\x00: {pattern!r:.200}")
