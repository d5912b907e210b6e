"""Small expressions of XGrammar's EBNF."""

from __future__ import annotations

from collections.abc import Iterable


def quoted(text: str) -> str:
    """Return the expression of a text."""
    found = "".join(
        f"\\{char}" if char in '"\\' else char if " " <= char <= "~" else _code(char)
        for char in text
    )
    return f'"{found}"'


def _code(char: str) -> str:
    return f"\\U{ord(char):08x}" if ord(char) > 0xFFFF else f"\\u{ord(char):04x}"


def times(low: int, high: int | None) -> str:
    return "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"


def one_of(parts: Iterable[str]) -> str | None:
    found = list(dict.fromkeys(parts))
    if not found:
        return None
    return found[0] if len(found) == 1 else "(" + " | ".join(found) + ")"
