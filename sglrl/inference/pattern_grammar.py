"""Convert a JSON schema's ``pattern`` to an expression of XGrammar's EBNF.

XGrammar's own conversion copies a pattern between the quotes of a JSON string, so that quotes,
backslashes and control characters break the JSON. This conversion writes each character as JSON
requires. Where the regular expressions of Python and ECMA differ, only text that both match is
allowed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Final, TypeAlias

Chars: TypeAlias = list[tuple[int, int]]
"""A set of characters, as sorted ranges of code points that include both ends."""
Writer: TypeAlias = Callable[[Chars], str]
"""A function that returns the expression of one character of a set."""

ALL: Final[Chars] = [(0, 0xD7FF), (0xE000, 0x10FFFF)]
"""The set of all characters: all code points except surrogates."""
_SPACES: Final[Chars] = [(9, 13), (32, 32)]
_DIGITS: Final[Chars] = [(48, 57)]
_WORD: Final[Chars] = [(48, 57), (65, 90), (95, 95), (97, 122)]
_LINE_ENDS: Final[Chars] = [(10, 10), (13, 13), (0x2028, 0x2029)]
_SIZES: Final[Chars] = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, 0x10FFFF)]
"""The ranges of characters with 1, 2, 3 and 4 bytes in UTF-8."""
_MOST: Final = 1 << 16


class UnsupportedPattern(ValueError):
    """A regular expression, or a part of it, cannot be written as a grammar."""


def pattern_expression(pattern: str, write: Writer) -> str:
    """Return the expression of the texts in which a pattern is found.

    Args:
        write: returns the expression of one character of a set.

    Raises:
        UnsupportedPattern: the pattern is wrong, or has look-around, back-references, or an anchor
            within the text.
    """
    try:
        parsed = _parser.parse(_python(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPattern(str(error)) from None
    if parsed.state.flags & ~re.UNICODE:
        raise UnsupportedPattern("flags are not supported")
    return _Pattern(write).search([*parsed])


def simple_pattern(pattern: str) -> tuple[Chars, int, int | None] | None:
    """Return the characters and the lengths of a pattern ``^[...]{a,b}$``, else None."""
    try:
        parsed = [*_parser.parse(_python(pattern))]
        if len(parsed) == 3 and _anchors(parsed[0], parsed[2]) and parsed[1][0] in _REPEATS:
            low, high, body = parsed[1][1]
            (one,) = body
            return _chars(one), int(low), None if high is op.MAXREPEAT else int(high)
    except (re.error, OverflowError, RecursionError, ValueError):
        pass
    return None


def pattern_width(pattern: str) -> tuple[int, int | None] | None:
    """Return the shortest and the longest length of a match.

    None: the pattern is wrong, or is not anchored at both ends.
    """
    try:
        parsed = _parser.parse(_python(pattern))
    except (re.error, OverflowError, RecursionError):
        return None
    items = [*parsed]
    if len(items) < 2 or not _anchors(items[0], items[-1]):
        return None
    low, high = parsed.getwidth()
    return low, None if high >= _MOST else high


_REPEATS: Final = (op.MAX_REPEAT, op.MIN_REPEAT)


def _python(pattern: str) -> str:
    """Return an ECMA pattern in the syntax of Python."""
    pattern = re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", pattern)
    pattern = re.sub(r"\\u\{([0-9a-fA-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", pattern)
    pattern = re.sub(r"\\c([A-Za-z])", lambda m: f"\\x{ord(m[1]) % 32:02x}", pattern)
    # ECMA allows an escaped slash.
    return pattern.replace("\\/", "/")


def _anchors(first: Any, last: Any) -> bool:
    return _begins(first) and _ends(last)


def _begins(item: Any) -> bool:
    return item[0] is op.AT and item[1] in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)


def _ends(item: Any) -> bool:
    return item[0] is op.AT and item[1] in (op.AT_END, op.AT_END_STRING)


class _Pattern:
    def __init__(self, write: Writer) -> None:
        self._write = write

    def search(self, items: list[Any]) -> str:
        """Return the expression of texts that contain a match."""
        if len(items) == 1 and items[0][0] is op.BRANCH:
            # Each branch may have its own anchors.
            return _any(self.search([*branch]) for branch in items[0][1][1])
        if len(items) == 1 and items[0][0] is op.SUBPATTERN and not any(items[0][1][1:3]):
            return self.search([*items[0][1][3]])
        rest = f"{self._write(ALL)}*"
        before = after = [rest]
        while items and _begins(items[0]):
            items, before = items[1:], []
        while items and _ends(items[-1]):
            items, after = items[:-1], []
        return " ".join([*before, *map(self._item, items), *after]) or '""'

    def _items(self, items: Any) -> str:
        return " ".join(map(self._item, items)) or '""'

    def _item(self, item: Any) -> str:
        code, value = item
        if code in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._write(_chars(item))
        if code is op.SUBPATTERN:
            _, add, remove, body = value
            if add or remove:
                raise UnsupportedPattern("flags are not supported")
            return f"({self._items(body)})"
        if code is op.BRANCH:
            return _any(self._items(branch) for branch in value[1])
        if code in _REPEATS:
            low, high, body = value
            return f"({self._items(body)}){times(low, None if high is op.MAXREPEAT else high)}"
        raise UnsupportedPattern(f"{str(code).lower()!r} is not supported within a pattern")


def _any(parts: Iterator[str]) -> str:
    return "(" + " | ".join(f"({part})" for part in parts) + ")"


def _chars(item: Any) -> Chars:
    """Return the set of characters that one item of a parsed pattern matches."""
    code, value = item
    if code is op.LITERAL:
        return intersection([(value, value)], ALL)
    if code is op.NOT_LITERAL:
        return complement([(value, value)])
    if code is op.ANY:
        return complement(_LINE_ENDS)
    if code is not op.IN:
        raise UnsupportedPattern("not a set of characters")
    negated = value[0][0] is op.NEGATE
    chars: Chars = []
    for kind, part in value[1:] if negated else value:
        if kind is op.LITERAL:
            chars.append((part, part))
        elif kind is op.RANGE:
            chars.append((part[0], part[1]))
        elif kind is op.CATEGORY:
            chars += _category(part, negated)
        else:
            raise UnsupportedPattern(f"{str(kind).lower()!r} is not supported in a set")
    return complement(chars) if negated else intersection(chars, ALL)


def _category(name: Any, wide: bool) -> Chars:
    """Return the characters of a category such as ``\\d``.

    Args:
        wide: True: return the characters that belong to the category in Python or in ECMA. False:
            return the characters that belong to it in both.
    """
    known = {
        op.CATEGORY_DIGIT: (_DIGITS, "isdecimal", False),
        op.CATEGORY_NOT_DIGIT: (_DIGITS, "isdecimal", True),
        op.CATEGORY_SPACE: (_SPACES, "isspace", False),
        op.CATEGORY_NOT_SPACE: (_SPACES, "isspace", True),
        op.CATEGORY_WORD: (_WORD, "isalnum", False),
        op.CATEGORY_NOT_WORD: (_WORD, "isalnum", True),
    }
    narrow, test, negated = known[name]
    if not negated:
        return [*narrow, *_unicode(test)] if wide else narrow
    return complement(narrow) if wide else complement([*narrow, *_unicode(test)])


@lru_cache(None)
def _unicode(test: str) -> tuple[tuple[int, int], ...]:
    """Return the characters that a method of ``str`` accepts, and U+FEFF for "isspace" (ECMA)."""
    more = {0xFEFF} if test == "isspace" else set()
    codes = [
        code for code in range(sys.maxunicode + 1) if code in more or getattr(chr(code), test)()
    ]
    return tuple(merged([(code, code) for code in codes]))


def merged(chars: Chars) -> Chars:
    """Return the same set of characters as sorted ranges that do not touch."""
    ranges: Chars = []
    for low, high in sorted(chars):
        if ranges and low <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], high))
        else:
            ranges.append((low, high))
    return ranges


def complement(chars: Chars) -> Chars:
    """Return all characters that are not in the set."""
    gaps, begin = [], 0
    for low, high in merged(chars):
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    gaps.append((begin, sys.maxunicode))
    return intersection([(low, high) for low, high in gaps if low <= high], ALL)


def intersection(first: Chars, second: Chars) -> Chars:
    """Return the characters that are in both sets."""
    pairs = [(max(a, c), min(b, d)) for a, b in merged(first) for c, d in merged(second)]
    return [(low, high) for low, high in pairs if low <= high]


def class_expression(chars: Chars) -> str:
    """Return the expression of one character of a set. The character has no JSON escape.

    XGrammar (0.2.1) handles only some ranges correctly: their characters in UTF-8 must be all
    combinations of a range for the first byte, a range for the second byte, and so on. So other
    ranges are split.
    """
    ranges = [
        pair
        for size in _SIZES
        for low, high in intersection(chars, [size])
        for pair in _aligned(low, high)
    ]
    return (
        "[" + "".join(_escaped(a) + ("" if a == b else "-" + _escaped(b)) for a, b in ranges) + "]"
    )


def _aligned(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Split a range of characters, all with the same number of bytes. See ``class_expression``."""
    for count in (1, 2, 3) if high > 0x7F else ():
        mask = (1 << 6 * count) - 1
        if low & ~mask != high & ~mask:
            if low & mask:
                yield from _aligned(low, low | mask)
                yield from _aligned((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _aligned(low, (high & ~mask) - 1)
                yield from _aligned(high & ~mask, high)
                return
    yield low, high


def quoted(text: str) -> str:
    """Return the expression of a text."""
    written = "".join(
        f"\\{char}" if char in '"\\' else char if " " <= char <= "~" else _escaped(ord(char))
        for char in text
    )
    return f'"{written}"'


def times(low: int, high: int | None) -> str:
    """Return the suffix for an expression that is repeated ``low`` to ``high`` times.

    If ``high`` is None, there is no upper limit.
    """
    return "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"


def one_of(parts: Iterable[str]) -> str | None:
    """Return an expression that allows any of the given expressions. None: none are given."""
    different = list(dict.fromkeys(parts))
    if not different:
        return None
    return different[0] if len(different) == 1 else "(" + " | ".join(different) + ")"


def _escaped(code: int) -> str:
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
