"""The trajectories that a viewer shows: those of files, and those that a running pool finishes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...errors import SglrlError, UsageError
from ...inference.completion import Decode
from ...sessions.live import EndedSample
from ...sessions.record import Record
from ...sessions.trajectory_files import iter_records, record_from, record_to
from .details import Pieces
from .rows import Filter, Rows

LIVE: Final = "live"
"""The name of the source with the samples of a running pool."""
FORKS: Final = "forks"


class Store:
    """Keeps a row in memory for each trajectory, and reads the trajectory itself when it is shown.

    The trajectories of a running pool are appended to a temporary file, which has no name.

    Attributes:
        rows: the rows of the trajectories.
        loading: what is still being loaded: "files", "tokenizer" or "".
        problems: why a file was not read to its end, or why there is no tokenizer.
        errors: why a sample has failed, by the number of its row.
        decode: turns token ids into text. None without a tokenizer.
        pieces: turns token ids into a text for each token.
    """

    def __init__(self) -> None:
        self.rows = Rows()
        self.loading = ""
        self.problems: list[str] = []
        self.errors: dict[int, str] = {}
        self.decode: Decode | None = None
        self.pieces = Pieces(None)
        self._files: list[BinaryIO] = []
        self._log: BinaryIO | None = None

    def close(self) -> None:
        for file in [*self._files, *filter(None, [self._log])]:
            # Closing writes what is buffered. On a full disk that fails, and nobody needs it.
            with contextlib.suppress(OSError):
                file.close()

    def load(
        self,
        paths: Sequence[Path],
        tokenizer: Callable[[], Decode] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read files that ``sglrl.rollouts.save`` wrote, and load the tokenizer.

        Runs in a thread of its own, so that the page opens at once. A damaged file adds its reason
        to ``problems``, after the trajectories before the damage.

        Args:
            tokenizer: loads the tokenizer, and returns the function for ``decode``.
            stopped: returns whether to stop early.
        """
        self.loading = "files"
        try:
            for path in paths:
                try:
                    self._load(path, stopped)
                except (UsageError, OSError) as error:
                    self.problems.append(str(error))
            if tokenizer is not None and not stopped():
                self.loading = "tokenizer"
                try:
                    decode = tokenizer()
                except SglrlError as error:
                    self.problems.append(f"token ids are shown, not text: {error}")
                else:
                    self.decode, self.pieces = decode, Pieces(decode)
        finally:
            self.loading = ""

    def _load(self, path: Path, stopped: Callable[[], bool]) -> None:
        source = self._source(str(path), open(path, "rb"))  # noqa: SIM115
        for offset, size, record in iter_records(path):
            self.rows.add(source, offset, size, record)
            if stopped():
                return

    def add_ended(self, sample: EndedSample) -> int:
        """Add a sample of a running pool, and return the number of its row.

        Raises:
            OSError: the disk is full.
        """
        if sample.trajectory is not None:
            number = self.add(LIVE, sample.trajectory, failed=bool(sample.error))
        else:
            source = self._named(LIVE)
            number = self.rows.add_failed(source, sample.item, sample.sample, sample.ended)
        if sample.error:
            self.errors[number] = sample.error
        return number

    def add(self, name: str, record: Record, *, failed: bool = False) -> int:
        """Add a trajectory to a source that is not a file. Return the number of its row.

        Args:
            failed: whether the sample was not finished.

        Raises:
            OSError: the disk is full.
        """
        source = self._named(name)
        log = self._files[source]
        data = record_to(record)
        offset = log.seek(0, os.SEEK_END)
        log.write(data)
        log.flush()
        # The buffers of a record of this process are not bytes.
        return self.rows.add(source, offset, len(data), record_from(data), failed)

    def record(self, number: int) -> Record | None:
        """Return a trajectory, or None if the sample has failed without a turn.

        Raises:
            UsageError: the file has changed.
            IndexError: there is no such row.
        """
        if not 0 <= number < self.rows.count:
            raise IndexError(number)
        row = self.rows.values[number]
        if not row["bytes"]:
            return None
        source = int(row["source"])
        data = os.pread(self._files[source].fileno(), int(row["bytes"]), int(row["offset"]))
        try:
            return record_from(data)
        except (msgspec.MsgspecError, ValueError) as error:
            name = self.rows.sources[source]
            raise UsageError(f"{name} has changed since it was opened: {error}") from error

    def find(
        self, numbers: NDArray[np.int64], wanted: Filter, seconds: float
    ) -> tuple[list[int], int]:
        """Return the rows whose trajectories contain all words, and how many rows were read.

        Stops after some seconds, so that a long search can be continued and shows its progress.
        """
        end = time.monotonic() + seconds
        found = []
        for at, number in enumerate(numbers.tolist()):
            text = self.text(number)
            if all(word in text for word in wanted.words):
                found.append(number)
            if time.monotonic() > end:
                return found, at + 1
        return found, len(numbers)

    def text(self, number: int) -> str:
        """Return all text of a trajectory in lower case: its messages, metadata and tokens."""
        record = self.record(number)
        parts = [self.errors.get(number, "")]
        if record is None:
            return parts[0].lower()
        for leaf in (*record.branches, record):
            # Without a tokenizer, only the messages can be searched.
            messages = msgspec.json.encode(leaf.messages or [], enc_hook=repr)
            parts.append(msgspec.json.format(messages, indent=0).decode())
            if self.decode is not None:
                ids = np.frombuffer(leaf.prompt_ids + leaf.response_ids, "<i4")
                parts.append(self.decode(ids.tolist(), False))
        parts.append(repr(record.metadata))
        return "\n".join(parts).lower()

    def preview(self, number: int, most: int = 160) -> str:
        """Return the first text that was sampled, or why the sample has failed."""
        if number in self.errors:
            return self.errors[number]
        record = self.record(number)
        if record is None:
            return ""
        if self.decode is not None:
            ids = np.frombuffer(record.response_ids, "<i4")[: most // 2]
            return self.decode(ids.tolist(), True)[:most]
        answers = [said for said in record.messages or [] if said.get("role") == "assistant"]
        return str(answers[0].get("content") or "")[:most] if answers else ""

    def _named(self, name: str) -> int:
        """Return the source with this name. All sources that are no files share one log."""
        if name in self.rows.sources:
            return self.rows.sources.index(name)
        if self._log is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
        return self._source(name, self._log)

    def _source(self, name: str, file: Any) -> int:
        self.rows.sources.append(name)
        self._files.append(file)
        return len(self._files) - 1
