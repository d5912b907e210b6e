"""Compute the fingerprint of a data set's items. Every process computes the same fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec
import numpy as np

_MAX_VALUES: Final = 1024
"""The number of values of an array that its fingerprint includes."""
_DEEPEST: Final = 32


class Fingerprint:
    """The fingerprint of a sequence of items.

    The fingerprint includes the values of texts, numbers, arrays, lists, mappings, dataclasses and
    msgspec structs. Of a large array it includes the shape and the first values. Of any other
    object it includes only the name of the class, because its ``repr`` may depend on the process.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, item: Any) -> None:
        self._add(item, 0)

    @property
    def text(self) -> str:
        """The fingerprint of all items so far, in hexadecimal digits."""
        return self._hash.hexdigest()

    def _put(self, tag: str, content: bytes = b"") -> None:
        # The length separates the values, so that different values never give the same bytes.
        self._hash.update(f"{tag}{len(content)}:".encode())
        self._hash.update(content)

    def _add(self, value: Any, depth: int) -> None:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (bool, int, float, complex)):
            self._put("v", repr(value).encode())
        elif isinstance(value, str):
            self._put("s", value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, (bytes, bytearray, memoryview)):
            self._put("b", bytes(value))
        elif depth >= _DEEPEST:
            self._put("deep")
        elif isinstance(value, np.ndarray):
            first = value.reshape(-1)[:_MAX_VALUES]
            self._put("a", f"{value.dtype.str} {value.shape}".encode())
            self._add(first.tolist(), depth + 1)
        elif isinstance(value, (list, tuple)):
            self._put(f"l{len(value)}")
            for one in value:
                self._add(one, depth + 1)
        elif isinstance(value, Mapping):
            self._add_mapping(value, depth)
        elif isinstance(value, Set):
            self._put(f"t{len(value)}", "".join(sorted(map(_alone, value))).encode())
        elif isinstance(value, msgspec.Struct):
            self._add_mapping(msgspec.structs.asdict(value), depth)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            self._add_mapping({name: getattr(value, name, None) for name in names}, depth)
        else:
            self._put("o", type(value).__qualname__.encode())

    def _add_mapping(self, value: Mapping[Any, Any], depth: int) -> None:
        self._put(f"m{len(value)}")
        for key in sorted(value, key=_alone):
            self._add(key, depth + 1)
            self._add(value[key], depth + 1)


def _alone(value: Any) -> str:
    """Return the fingerprint of one value. Unordered values are sorted by it."""
    made = Fingerprint()
    made.add(value)
    return made.text
