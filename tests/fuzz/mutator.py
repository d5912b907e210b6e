"""Messages made from real messages, with random mutations that depend on a seed."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec

FRAMES = int(os.environ.get("SGLRL_FUZZ_FRAMES", "200000"))
SEED = int(os.environ.get("SGLRL_FUZZ_SEED", "4"))

INTEGERS = (
    *(0, 1, -1, 2, 3, 4, 7, 100, 127, 128, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, -(1 << 31)),
    *((1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), 1 << 63, (1 << 64) - 1),
)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1e-308, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "\0",
    "x" * 300,
    "ä\u202e😀",
    "generate",
    "join",
    "prepare",
    "commit",
    "[/red]",
    "%s%n",
)
LENGTHS = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff", b"\x00")
HEADS = (0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xCA, 0xCF, 0xD3, 0xD4, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF)
TAGS = (*range(-1, 60), 1 << 40)
NOT_UTF8 = (b"\xa1\xff", b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80", b"\xd9\x02\xfe\xff")


class Mutator:
    """Makes mutated messages.

    Attributes:
        samples: real messages, as lists of frames.
        ids: numbers that are valid ids at the receiver. May be changed at any time.
    """

    def __init__(self, samples: Sequence[Sequence[bytes]], seed: int = SEED) -> None:
        self.random = Random(seed)
        self.samples = [list(map(bytes, message)) for message in samples]
        self.ids: list[int] = [1]
        self._trees = [msgspec.msgpack.decode(message[0]) for message in samples]

    def message(self) -> list[bytes]:
        """Return a message of one or more frames. Some messages stay harmless, by chance."""
        random = self.random
        at = random.randrange(len(self.samples))
        head, *raw = self.samples[at]
        how = random.random()
        if how < 0.45:
            head = self._tree(at)
        if how > 0.4:
            for _ in range(1 + int(random.expovariate(1.0))):
                head = self._bytes(head)
        if random.random() < 0.15:
            raw = [random.randbytes(random.randrange(40)) for _ in range(random.randrange(5))]
        return [head, *raw]

    # --- changes of values ------------------------------------------------------------------------

    def _tree(self, at: int) -> bytes:
        tree = self._trees[at]
        for _ in range(1 + int(self.random.expovariate(0.7))):
            tree = self._changed(tree)
        try:
            return msgspec.msgpack.encode(tree)
        except (OverflowError, TypeError, ValueError, RecursionError):
            return self._bytes(self.samples[at][0])

    def _changed(self, tree: Any) -> Any:
        """Return the tree with one change at a random place."""
        random = self.random
        if not isinstance(tree, (list, dict)) or not tree or random.random() < 0.1:
            return self._other(tree)
        if isinstance(tree, dict):
            changed = dict(tree)
            key = random.choice(list(tree))
            if random.random() < 0.2:
                value = changed.pop(key)
                if random.random() < 0.5:
                    changed[random.choice(TEXTS)] = value
            else:
                changed[key] = self._changed(tree[key])
            return changed
        items = list(tree)
        at = random.randrange(len(items))
        how = random.random()
        if how < 0.06:
            del items[at]
        elif how < 0.12:
            items.insert(at, items[random.randrange(len(items))])
        elif how < 0.16:
            items += items[:50]
        elif how < 0.2:
            other = random.randrange(len(items))
            items[at], items[other] = items[other], items[at]
        elif how < 0.24:
            items[0] = random.choice(TAGS)
        else:
            items[at] = self._changed(items[at])
        return items

    def _other(self, value: Any) -> Any:
        random = self.random
        how = random.random()
        if how < 0.3:
            if isinstance(value, bool):
                return not value
            if isinstance(value, int):
                return random.choice((*INTEGERS, *self.ids, value + 1, value - 1))
            if isinstance(value, float):
                return random.choice(FLOATS)
            if isinstance(value, str):
                return random.choice(TEXTS)
            if isinstance(value, bytes):
                return value[: random.randrange(len(value) + 1)] + random.randbytes(3)
        if how < 0.5:
            return random.choice(self.ids)
        if how < 0.6:
            return random.choice(INTEGERS)
        if how < 0.7:
            return random.choice(TEXTS)
        if how < 0.75:
            return random.choice(FLOATS)
        if how < 0.85:
            return random.choice((None, True, [], {}, b"", b"\xff" * 7))
        if how < 0.95:
            return self._trees[random.randrange(len(self._trees))]
        for _ in range(random.choice((1, 3, 30, 300))):
            value = [value]
        return value

    # --- changes of bytes and frames --------------------------------------------------------------

    def _bytes(self, data: bytes) -> bytes:
        random = self.random
        at = random.randrange(len(data) + 1)
        how = random.randrange(12)
        if how == 0 and data:
            at = random.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        if how == 1:
            return data[:at]
        if how == 2:
            other = random.choice(self.samples)[0]
            return data[:at] + other[random.randrange(len(other)) :]
        if how == 3:
            length = random.choice(LENGTHS)
            return data[:at] + length + data[at + len(length) :]
        if how == 4:
            return data[:at] + random.randbytes(random.randrange(1, 9)) + data[at:]
        if how == 5:
            end = min(len(data), at + random.randrange(1, 9))
            return data[:at] + data[end:]
        if how == 6:
            return data[:at] + bytes([random.choice(HEADS)]) + data[at + 1 :]
        if how == 7:
            return data[:at] + random.choice(NOT_UTF8) + data[at + 1 :]
        if how == 8:
            depth = random.choice((5, 200, 2000, 20_000))
            return data[:at] + random.choice((b"\x91", b"\x81\xc0", b"\xdc\x00\x01")) * depth
        if how == 9:
            kind = random.choice((1, 1, 1, 2, 255, 0, 5))
            body = random.choice(
                (
                    msgspec.msgpack.encode([random.choice(INTEGERS), self._dtype(), self._shape()]),
                    random.randbytes(random.randrange(12)),
                )
            )
            return data[:at] + struct.pack(">BBB", 0xC7, len(body) & 255, kind) + body + data[at:]
        if how == 10:
            return random.randbytes(random.randrange(80))
        number = random.choice((*INTEGERS, *self.ids))
        return data[:at] + msgspec.msgpack.encode(number) + data[at + 1 :]

    def _dtype(self) -> str:
        return self.random.choice(
            (
                *("<f4", "<i8", "|u1", "O", "|O", "V8", "<U3", "M8[ns]", "f4,f4", "(2,3)f4", "?"),
                *(
                    "(99999999,)f8",
                    "x",
                    "",
                    "{'a':1}",
                    "[('a','<f4')]",
                    "S",
                    "V",
                    "<f4\0",
                    "((",
                    "c16",
                ),
            )
        )

    def _shape(self) -> list[int]:
        return [self.random.choice(INTEGERS) for _ in range(self.random.randrange(4))]
