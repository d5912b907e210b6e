"""Check numbers that users give. A wrong number raises ``InvalidRequest``."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from operator import index
from typing import Any, Final

import numpy as np

from ..errors import InvalidRequest

_FLOAT32: Final = struct.Struct("<f")


def check_integer(name: str, value: Any, low: int, high: float = (1 << 31) - 1) -> None:
    try:
        # Arrays and tensors have __index__ too, but it works only for a single integer.
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}")
    if number < low:
        raise InvalidRequest(f"{name} must be at least {low}, got {value}")
    if number > high:
        raise InvalidRequest(f"{name} must be at most {high}, got {value}")


def max_top_logprobs(vocab_size: int) -> int:
    """Return the maximum of ``top_logprobs``, and of the length of ``token_ids_logprob``."""
    return min(1000, vocab_size)


def check_token_ids(name: str, value: Any) -> None:
    try:
        tokens = [*value] if isinstance(value, Collection) else None
    except TypeError:
        # A zero-dimensional array.
        tokens = None
    if tokens is None or isinstance(value, (str, bytes)):
        raise InvalidRequest(f"{name} must be a list of token ids, got {value!r}")
    for token in tokens:
        check_integer(name, token, 0)


def _float32(number: float) -> float:
    """Round a number to float32, as engines do: 1e39 becomes infinite, and 1e-46 becomes 0."""
    try:
        (narrow,) = _FLOAT32.unpack(_FLOAT32.pack(number))
    except OverflowError:
        return math.copysign(math.inf, number)
    return float(narrow)


def check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__float__"):
        raise InvalidRequest(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise InvalidRequest(f"{name} must be a number, got {value!r}") from None
    narrow = _float32(number)
    finite = math.isfinite(number) and narrow < math.inf
    if not finite or number > high or number < low or (open_low and narrow == low):
        bracket = "(" if open_low else "["
        upper = "inf)" if high == math.inf else f"{high:g}]"
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {upper}, got {value}")
