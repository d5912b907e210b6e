"""The log files to which workers write their output."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Final

from ..config import cache_dir
from ..errors import UsageError

_MOST: Final = 50
"""Maximum number of logs of failed workers in the cache folder."""


class WorkerLogs:
    """Names the logs of one pool's workers, and keeps them.

    Args:
        log_dir: folder for the logs of all workers. None: the logs are temporary, and only the log
            of a worker that fails is kept, in ``logs`` in the cache folder.
    """

    def __init__(self, log_dir: str | None) -> None:
        self._dir = None if log_dir is None else Path(log_dir).expanduser().absolute()
        self._begun = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def make_folder(self) -> None:
        """Make ``log_dir``.

        Raises:
            UsageError: the folder cannot be made or written.
        """
        if self._dir is None:
            return
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"log_dir {self._dir} cannot be made: {error.strerror}") from None
        if not os.access(self._dir, os.W_OK):
            raise UsageError(f"log_dir {self._dir} cannot be written")

    def path(self, folder: Path, index: int, earlier: int) -> Path:
        """Return the path of a worker's log.

        Args:
            folder: the temporary folder of the pool.
            index: the index of the worker.
            earlier: number of earlier workers with this index.
        """
        again = f"-{earlier}" if earlier else ""
        name = f"{self._begun}-worker-{index}{again}.log"
        return (self._dir or folder) / name

    def keep(self, log: Path) -> str:
        """Keep the log of a failed worker. Return the path of the kept log, or "" without one."""
        try:
            if not log.stat().st_size:
                return ""
            if self._dir is not None:
                return str(log)
            folder = cache_dir() / "logs"
            folder.mkdir(parents=True, exist_ok=True)
            kept = shutil.copy(log, folder / log.name)
        except OSError:
            return ""
        for old in sorted(folder.glob("*.log"), key=_age)[_MOST:]:
            with contextlib.suppress(OSError):
                old.unlink()
        return str(kept)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
