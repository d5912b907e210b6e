"""Write the decimal numbers of a range as expressions of XGrammar's EBNF."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, Final, NamedTuple

INTEGER: Final = '("-"? ("0" | [1-9] [0-9]*))'
NUMBER: Final = '("-"? ("0" | [1-9] [0-9]{0,99}) ("." [0-9]+)? ([eE] [+-]? [0-9]{1,2})?)'
"""The expression of numbers without a given range. Each of them is finite as a float."""
_DIGITS: Final = 15
"""The number of significant decimal digits that a float keeps."""


class Range(NamedTuple):
    """A range of numbers.

    Attributes:
        low, high: the ends of the range, or None if the range has no such end.
        open_low, open_high: whether the end itself is outside the range.
    """

    low: Decimal | None = None
    high: Decimal | None = None
    open_low: bool = False
    open_high: bool = False

    @property
    def bounded(self) -> bool:
        return self.low is not None or self.high is not None


def range_of(schema: dict[str, Any]) -> Range:
    """Return the range that ``minimum``, ``exclusiveMinimum`` and so on of a schema describe."""
    low, open_low = _strictest(schema, "minimum", "exclusiveMinimum", 1)
    high, open_high = _strictest(schema, "maximum", "exclusiveMaximum", -1)
    return Range(low, high, open_low, open_high)


def _strictest(
    schema: dict[str, Any], closed: str, strict: str, sign: int
) -> tuple[Decimal | None, bool]:
    ends = [(_decimal(schema[name]), name == strict) for name in (closed, strict) if name in schema]
    return max(ends, key=lambda end: (sign * end[0], end[1]), default=(None, False))


def _decimal(value: Any) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.99} is not a number")
    return Decimal(value) if isinstance(value, int) else Decimal(repr(float(value)))


def integers(range_: Range) -> str | None:
    """Return the expression of the integers in a range, or None if there are none."""
    low, high, open_low, open_high = range_
    first = None if low is None else int(low.to_integral_value(ROUND_CEILING))
    last = None if high is None else int(high.to_integral_value(ROUND_FLOOR))
    if first is not None and first == low and open_low:
        first += 1
    if last is not None and last == high and open_high:
        last -= 1
    if first is not None and last is not None and first > last:
        return None
    parts = []
    if first is None or first < 0:
        # The magnitudes of negative numbers.
        most = None if first is None else -first
        parts.append(f'"-" {_naturals(max(1, -last) if last is not None else 1, most)}')
    if last is None or last >= 0:
        parts.append(_naturals(max(0, first or 0), last))
    return f"({' | '.join(parts)})"


def _naturals(low: int, high: int | None) -> str:
    """Return the expression of the integers from ``low`` to ``high``, which are not negative."""
    low_digits = str(low)
    if high is None:
        more = f"[1-9] [0-9]{{{len(low_digits)},}}"
        return f"({_same_length(low_digits, '9' * len(low_digits))} | {more})"
    parts = []
    for count in range(len(low_digits), len(str(high)) + 1):
        begin = low_digits if count == len(low_digits) else "1" + "0" * (count - 1)
        end = str(high) if count == len(str(high)) else "9" * count
        if begin == "0" and end != "0" and count == 1:
            parts.append(f"[0-{end}]")
        else:
            parts.append(_same_length(begin, end))
    return f"({' | '.join(parts)})"


def _same_length(low: str, high: str) -> str:
    """Return the expression of the numbers between two numbers with the same count of digits."""
    if not low:
        return '""'
    if low[0] == high[0]:
        return f'"{low[0]}" {_same_length(low[1:], high[1:])}'
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return f"[{low[0]}-{high[0]}] {_repeat(len(low) - 1)}"
    rest = len(low) - 1
    parts = [f'"{low[0]}" {_same_length(low[1:], "9" * rest)}']
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] {_repeat(rest)}")
    parts.append(f'"{high[0]}" {_same_length("0" * rest, high[1:])}')
    return f"({' | '.join(parts)})"


def _repeat(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else '""'


def decimals(range_: Range) -> str | None:
    """Return the expression of the numbers in a range, without exponents, or None if none."""
    low, high, open_low, open_high = range_
    parts = []
    zero = Decimal(0)
    if low is None or low < 0:
        # The magnitudes of negative numbers.
        below = high is not None and high <= 0
        begin = -high if below and high is not None else zero
        magnitudes = _magnitudes(
            begin, None if low is None else -low, open_high if below else False, open_low
        )
        parts += [f'"-" {magnitudes}'] if magnitudes else []
    if high is None or high >= 0:
        above = low is not None and low >= 0
        begin = low if above and low is not None else zero
        magnitudes = _magnitudes(begin, high, open_low if above else False, open_high)
        parts += [magnitudes] if magnitudes else []
    return f"({' | '.join(parts)})" if parts else None


def _magnitudes(low: Decimal, high: Decimal | None, open_low: bool, open_high: bool) -> str | None:
    """Return the expression of the numbers between two numbers that are not negative, or None."""
    if high is not None and (low > high or (low == high and (open_low or open_high))):
        return None
    whole, digits = _split(low)
    if high is None:
        parts = [
            _with_fraction(whole, _at_least(digits, open_low, _spare(whole)), digits, open_low)
        ]
        parts.append(f"{_naturals(whole + 1, None)} {_any_fraction(_DIGITS)}")
        return f"({' | '.join(part for part in parts if part)})"
    last, end = _split(high)
    # Rounding to a float may make a number equal to an open high end. So if the high end is open,
    # limit the digits of the numbers.
    spare = _spare(last) if open_high else _DIGITS
    if whole == last:
        fraction = _between(digits, end, open_low, open_high, _spare(last))
        return _with_fraction(whole, fraction, digits, open_low)
    parts = [_with_fraction(whole, _at_least(digits, open_low, _spare(whole)), digits, open_low)]
    if last - whole > 1:
        parts.append(f"{_naturals(whole + 1, last - 1)} {_any_fraction(spare)}")
    # ``last`` without a fraction is in the range, unless it is the open end itself.
    excluded = open_high and not end
    parts.append(_with_fraction(last, _at_most(end, open_high, spare), "", excluded))
    return f"({' | '.join(part for part in parts if part)})"


def _split(value: Decimal) -> tuple[int, str]:
    """Return the whole part of a number, and the digits of its fraction without trailing zeros."""
    whole, _, fraction = format(value, "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _spare(whole: int) -> int:
    """Return how many digits a fraction may have without being rounded as a float."""
    return max(1, _DIGITS - len(str(whole)))


def _any_fraction(spare: int) -> str:
    return f'("." [0-9]{{1,{spare}}})?'


def _with_fraction(whole: int, fraction: str | None, low: str, excluded: bool) -> str | None:
    """Return the expression of a whole part with a fraction.

    The fraction is optional if ``low`` is "" and ``excluded`` is False. The result is None if a
    fraction is required and ``fraction`` is None.

    Args:
        low: the digits of the smallest fraction.
        excluded: whether the number without a fraction is outside the range.
    """
    without = not low and not excluded
    if fraction is None:
        return f'"{whole}"' if without else None
    return f'"{whole}" ("." {fraction}){"?" if without else ""}'


def _more(spare: int, digits: int) -> str:
    return f"[0-9]{{0,{max(0, spare - digits)}}}"


def _at_least(low: str, strict: bool, spare: int, depth: int = 0) -> str | None:
    """Return the expression of the digits of fractions of at least ``low``.

    Args:
        strict: whether ``low`` itself is excluded.
    """
    if not low:
        if not strict:
            return f"[0-9]{{{0 if depth else 1},{max(1, spare - depth)}}}"
        # The fraction must be more than 0, so one of its digits is not 0.
        return f'"0"{{0,{max(0, spare - depth - 1)}}} [1-9] {_more(spare, depth + 1)}'
    parts = []
    if low[0] != "9":
        parts.append(f"[{int(low[0]) + 1}-9] {_more(spare, depth + 1)}")
    parts.append(f'"{low[0]}" {_at_least(low[1:], strict, spare, depth + 1)}')
    return f"({' | '.join(parts)})"


def _at_most(high: str, strict: bool, spare: int, depth: int = 0) -> str | None:
    """Return the expression of the digits of fractions of at most ``high``, or None if none."""
    if not high:
        if strict:
            return None
        return f'"0"{{{0 if depth else 1},{max(1, spare - depth)}}}'
    parts = []
    if high[0] != "0":
        parts.append(f"[0-{int(high[0]) - 1}] {_more(spare, depth + 1)}")
    rest = _at_most(high[1:], strict, spare, depth + 1)
    if rest is not None:
        # If ``high`` has more digits, a fraction that stops after this digit is smaller.
        parts.append(f'"{high[0]}" ({rest}){"?" if high[1:] else ""}')
    return f"({' | '.join(parts)})" if parts else None


def _between(
    low: str, high: str, open_low: bool, open_high: bool, spare: int, depth: int = 0
) -> str | None:
    """Return the expression of the digits of fractions between two fractions, or None if none."""
    if not low and not open_low:
        return _at_most(high, open_high, spare, depth)
    if not high:
        # The high end has no more digits, so only a fraction equal to both ends is left.
        return None if low or open_low or open_high else _at_most("", False, spare, depth)
    begin = low[:1] or "0"
    if begin == high[0]:
        rest = _between(low[1:], high[1:], open_low, open_high, spare, depth + 1)
        if rest is None:
            return None
        ends = not low[1:] and not open_low and bool(high[1:] or not open_high)
        return f'"{begin}" ({rest}){"?" if ends else ""}'
    parts = [f'"{begin}" {_at_least(low[1:], open_low, spare, depth + 1)}']
    if int(high[0]) - int(begin) > 1:
        parts.append(f"[{int(begin) + 1}-{int(high[0]) - 1}] {_more(spare, depth + 1)}")
    rest = _at_most(high[1:], open_high, spare, depth + 1)
    if rest is not None:
        parts.append(f'"{high[0]}" ({rest}){"?" if high[1:] else ""}')
    return f"({' | '.join(parts)})"
