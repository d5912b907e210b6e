"""A table with one row of numbers for each trajectory, in columns, so that filters are fast."""

from __future__ import annotations

import operator
import re
import shlex
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import UsageError
from ...sessions.record import Record

DTYPE: Final = np.dtype(
    [
        ("source", "i4"),
        ("offset", "i8"),
        ("bytes", "i8"),
        ("group", "i4"),
        ("sample", "i4"),
        ("reward", "f8"),
        ("prompt", "i4"),
        ("tokens", "i4"),
        ("sampled", "i4"),
        ("turns", "i4"),
        ("branches", "i4"),
        ("oldest", "i4"),
        ("newest", "i4"),
        ("started", "f8"),
        ("seconds", "f8"),
        ("engine", "f8"),
        ("finish", "i1"),
        ("failed", "?"),
    ]
)
"""One row. ``offset`` and ``bytes`` say where the record is in its source."""

FINISH: Final = ("", "stop", "length", "abort")
_OPERATORS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TERM: Final = re.compile(r"(\w+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_NUMBERS: Final = {
    "group": "group",
    "sample": "sample",
    "reward": "reward",
    "prompt": "prompt",
    "tokens": "tokens",
    "sampled": "sampled",
    "turns": "turns",
    "branches": "branches",
    "oldest": "oldest",
    "newest": "newest",
    "started": "started",
    "seconds": "seconds",
    "engine": "engine",
}
NAMES: Final = (*_NUMBERS, "version", "tools", "item", "file", "finish", "failed")
"""The names in filters."""


class Filter(NamedTuple):
    """What a search wants.

    Attributes:
        terms: triples of a name, an operator and a value.
        words: texts that a trajectory contains, in lower case.
    """

    terms: tuple[tuple[str, str, str], ...]
    words: tuple[str, ...]


def parse(text: str) -> Filter:
    """Read a filter, such as ``reward<0.5 finish=length "wrong answer"``.

    Raises:
        UsageError: a name or a value is wrong.
    """
    terms, words = [], []
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the filter {text!r} has an open quote ({error})") from None
    for part in parts:
        if found := _TERM.fullmatch(part):
            name, sign, value = found.groups()
            if name not in NAMES:
                raise UsageError(f"unknown name {name!r} in the filter; known: {', '.join(NAMES)}")
            terms.append((name, sign, value))
        else:
            words.append(part.lower())
    return Filter(tuple(terms), tuple(words))


class Rows:
    """The rows of all trajectories. Several threads may add rows and read them.

    Attributes:
        items: for each group, the item's index or name in its metadata, or None.
        sources: the name of each file, or of another source.
    """

    def __init__(self) -> None:
        self._rows = np.zeros(1024, DTYPE)
        self.count = 0
        self.items: list[Any] = []
        self.sources: list[str] = []
        self._groups: dict[Any, int] = {}
        self._lock = threading.Lock()

    @property
    def values(self) -> NDArray[Any]:
        """All rows, [count] of ``DTYPE``."""
        return self._rows[: self.count]

    def add(self, source: int, offset: int, size: int, record: Record, failed: bool = False) -> int:
        """Add a trajectory, and return its number.

        Args:
            failed: whether the sample was not finished. It has no reward then.
        """
        turns = record.turns
        oldest, newest = _versions(record)
        reward, engine = 0.0, 0.0
        for turn in turns:
            reward += turn.reward
            engine += turn.seconds
        sampled = record.loss_mask.count(1)
        for branch in record.branches:
            reward += sum([turn.reward for turn in branch.turns])
            sampled += branch.loss_mask.count(1)
            first, last = _versions(branch)
            oldest, newest = min(oldest, first), max(newest, last)
        metadata, timing = record.metadata, record.timing
        group = self._group(source, metadata.get("item"), record.prompt_ids)
        sample = metadata.get("sample")
        finish = turns[-1].finish_reason if turns else ""
        return self._append(
            (
                source,
                offset,
                size,
                group,
                sample if type(sample) is int else -1,
                np.nan if failed else reward,
                len(record.prompt_ids) // 4,
                len(record.response_ids) // 4,
                sampled,
                len(turns),
                len(record.branches),
                oldest,
                newest,
                timing.started,
                timing.total,
                engine,
                FINISH.index(finish) if finish in FINISH else 0,
                failed,
            )
        )

    def add_failed(self, source: int, item: Any, sample: int, ended: float) -> int:
        """Add a sample that has failed without a turn, and return its number."""
        group = self._group(source, item, b"")
        values = (source, 0, 0, group, sample, np.nan, 0, 0, 0, 0, 0, -1, -1, ended, 0.0, 0.0, 0)
        return self._append((*values, True))

    def matching(self, wanted: Filter) -> NDArray[np.int64]:
        """Return the numbers of the rows that fulfil all terms. Words are not considered.

        Raises:
            UsageError: a value has the wrong type.
        """
        rows = self.values
        mask = np.ones(len(rows), bool)
        for name, sign, value in wanted.terms:
            mask &= self._compared(rows, name, sign, value)
        return np.flatnonzero(mask)

    def order(self, numbers: NDArray[np.int64], name: str, descending: bool) -> NDArray[np.int64]:
        """Return rows in the order of a column, or of "item".

        Raises:
            UsageError: there is no such column.
        """
        rows = self.values[numbers]
        if name == "item":
            # Items that are numbers come first, in the order of the numbers.
            ranks = sorted(range(len(self.items)), key=lambda group: _rank(self.items[group]))
            place = np.empty(len(ranks), np.int64)
            place[ranks] = np.arange(len(ranks))
            values = place[rows["group"]]
        elif name in (rows.dtype.names or ()):
            values = rows[name]
        else:
            raise UsageError(f"cannot sort by {name!r}")
        return numbers[np.argsort(-values if descending else values, kind="stable")]

    def _compared(self, rows: NDArray[Any], name: str, sign: str, value: str) -> Any:
        compare = _OPERATORS[sign]
        if name in ("item", "file"):
            # The values of these names are texts, and there are fewer of them than rows.
            known = self.items if name == "item" else self.sources
            column = rows["group" if name == "item" else "source"]
            try:
                chosen = [_pair(compare, str(one), value) for one in known]
            except ValueError:
                raise UsageError(f"{name}{sign} needs a number, got {value!r}") from None
            return np.array([*chosen, False])[column]
        if name in ("finish", "failed"):
            words = FINISH if name == "finish" else ("no", "yes")
            if value not in words or sign not in ("=", "!="):
                texts = ", ".join(filter(None, words))
                raise UsageError(f"{name} may be = or != one of {texts}, got {sign}{value}")
            return compare(rows[name], words.index(value))
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"{name}{sign} needs a number, got {value!r}") from None
        if name == "version":
            within = (rows["oldest"] <= number) & (number <= rows["newest"])
            return {"=": within, "!=": ~within}.get(
                sign, compare(rows["oldest" if ">" in sign else "newest"], number)
            )
        if name == "tools":
            return compare(rows["seconds"] - rows["engine"], number)
        return compare(rows[_NUMBERS[name]], number)

    def _group(self, source: int, item: Any, prompt: bytes) -> int:
        """Return the number of the group: the trajectories of a source with the same item.

        Without an item, trajectories with the same prompt are a group.
        """
        key = (source, prompt) if item is None else (source, str(item))
        group = self._groups.get(key)
        if group is None:
            with self._lock:
                group = self._groups[key] = len(self.items)
                self.items.append(item)
        return group

    def _append(self, row: tuple[Any, ...]) -> int:
        with self._lock:
            number = self.count
            if number == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros(number, DTYPE)])
            self._rows[number] = row
            self.count = number + 1
        return number


def _pair(compare: Callable[[Any, Any], Any], text: str, value: str) -> bool:
    if compare in (operator.eq, operator.ne):
        return bool(compare(text, value))
    number = float(value)
    try:
        return bool(compare(float(text), number))
    except ValueError:
        # The name of this item is not a number.
        return False


def _rank(item: Any) -> tuple[bool, float, str]:
    number = type(item) in (int, float)
    return not number, item if number else 0.0, "" if number else str(item)


def _versions(record: Record) -> tuple[int, int]:
    """Return the oldest and the newest version of a conversation.

    The versions within a turn never decrease, so the ends of the turns have both.
    """
    ends = []
    versions = record.versions
    for turn in record.turns:
        if turn.stop > turn.start:
            ends.append(int.from_bytes(versions[4 * turn.start : 4 * turn.start + 4], "little"))
            ends.append(int.from_bytes(versions[4 * turn.stop - 4 : 4 * turn.stop], "little"))
    return (min(ends), max(ends)) if ends else (-1, -1)
