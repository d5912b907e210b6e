"""The output file of ``sglrl eval``, from which a run that was killed continues.

Each finished item is one JSON line, which holds all samples of the item. The file never has some
samples of an item without the others. The first field is the number of the item's line in the
input, and shows which items are finished.

A second file ``OUTPUT.run`` holds the options. It is written while the output is still empty. A
kill at any moment therefore leaves one of three states. If the output is empty, the next run begins
anew. If it has whole lines, the next run continues. If it ends with a part of a line, the next run
removes this part and continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from ...errors import UsageError
from ...rollouts.evaluation import Outcome
from ...wire.codec import malformed
from .items import Item

_ANEW: Final = "begin anew with --overwrite, or name another --output"


class Sample(Outcome, frozen=True, kw_only=True, omit_defaults=True):
    """A sample as the output file holds it.

    Attributes:
        text: the text of the turn, without special tokens. With ``--agent``, the whole text after
            the prompt, with special tokens.
        rewards: the named rewards of ``--agent``.
        output_ids, logprobs: the id and the logprob of each token after the prompt. None without
            ``--logprobs``. With ``--agent``, the logprobs of tokens that were not sampled are 0.
    """

    text: str
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    output_ids: list[int] | None = None
    logprobs: list[float] | None = None


class ResultsFile:
    """The output file, open and locked inside ``with``.

    Args:
        path: the path of the file.
        options: the options that determine the samples and scores. They must be JSON values.
        items: the items of the input.
        overwrite: remove the results of an earlier run.

    Attributes:
        finished: the outcomes of each finished item, by the item's line number in the input.

    Raises:
        UsageError: on entering, if another process writes the file, if the earlier run had other
            options, or if a finished item has changed in the input.
        OSError: on entering, if the file cannot be written.
    """

    def __init__(
        self, path: Path, options: Mapping[str, Any], items: Sequence[Item], *, overwrite: bool
    ) -> None:
        self.path = path
        self.finished: dict[int, list[Outcome]] = {}
        # A later run reads the options from JSON, so they are compared in that form.
        self._options = msgspec.json.decode(msgspec.json.encode(options))
        self._items = {item.line: item for item in items}
        self._overwrite = overwrite

    def __enter__(self) -> Self:
        self._file = open(self.path, "a+b")
        try:
            self._lock()
            if self._overwrite:
                self._file.truncate(0)
            beside = self.path.with_name(f"{self.path.name}.run")
            if os.fstat(self._file.fileno()).st_size == 0:
                text = msgspec.json.format(msgspec.json.encode(self._options))
                beside.write_bytes(text + b"\n")
            else:
                self._compare_options(beside)
                self._load()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, item: Item, samples: Sequence[Sample]) -> None:
        """Write the samples of an item that is finished."""
        record = {"line": item.line, **item.fields, "samples": samples}
        self._file.write(msgspec.json.encode(record) + b"\n")
        self._file.flush()
        self.finished[item.line] = [
            Outcome(finish_reason=s.finish_reason, tokens=s.tokens, score=s.score) for s in samples
        ]

    def _lock(self) -> None:
        """Lock the file. Raise ``UsageError`` if another process has it locked.

        The lock is released when its process exits.
        """
        # Some network file systems have no locks.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"another process is writing {self.path}; wait for it, or end it"
                ) from None

    def _compare_options(self, beside: Path) -> None:
        try:
            content = beside.read_bytes()
            earlier = msgspec.json.decode(content, type=dict[str, Any])
        except FileNotFoundError:
            raise UsageError(
                f"{self.path} exists, but not {beside}, so sglrl eval did not write it; {_ANEW}"
            ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{beside} is damaged: {malformed(error, content)}; {_ANEW}") from None
        differences = [
            f"{name} was {earlier.get(name)!r:.100} and is {self._options.get(name)!r:.100}"
            for name in {**earlier, **self._options}
            if earlier.get(name) != self._options.get(name)
        ]
        if differences:
            raise UsageError(
                f"{self.path} was written with other options: {'; '.join(differences)}. Use the "
                f"same options to continue; {_ANEW}"
            )

    def _load(self) -> None:
        """Read the finished items, and remove an incomplete line at the end of the file."""
        end = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            self._load_line(line, f"{self.path}:{number}")
            end += len(line)
        self._file.truncate(end)

    def _load_line(self, line: bytes, place: str) -> None:
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
            index = msgspec.convert(record.pop("line"), int)
            outcomes = msgspec.convert(record.pop("samples"), list[Outcome])
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
            why = malformed(error, line)
            raise UsageError(f"{place} is not a line of sglrl eval: {why}; {_ANEW}") from None
        item = self._items.get(index)
        if item is None or item.fields != record:
            raise UsageError(
                f"{place} has the results of line {index} of the input, which has changed since; "
                f"restore the line, or {_ANEW}"
            )
        if index in self.finished:
            raise UsageError(f"{place} has the results of line {index} a second time; {_ANEW}")
        self.finished[index] = outcomes
