"""Log the failures of a run: each kind of error once in full, and later its count now and then."""

from __future__ import annotations

import logging
import re

from ..core.failures import Failures, Kind
from ..errors import RemoteError, RolloutFailed, SglrlError
from ..wire.codec import readable

logger = logging.getLogger("sglrl.rollout")

_REMOTE_FRAME = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)


class FailureLog:
    """Counts the failed attempts of a run and logs them.

    Args:
        max_rate: see ``rollout``.
    """

    def __init__(self, max_rate: float | None) -> None:
        self._failures = Failures(max_rate)

    def went_well(self, concurrency: int) -> None:
        self._failures.attempt(False, concurrency)

    def count(self, error: Exception, concurrency: int) -> Kind:
        """Count a failed attempt.

        Raises:
            RolloutFailed: too many of the latest attempts have failed.
        """
        failures = self._failures
        message = error.message if isinstance(error, SglrlError) else readable(error)
        if isinstance(error, RemoteError):
            message = message.removeprefix(f"{error.kind}: ")
        kind = failures.count(_name_of(error), place_of(error), message)
        rate = failures.attempt(True, concurrency)
        if rate is not None:
            worst = failures.most_frequent()
            assert worst is not None
            raise RolloutFailed(
                f"{rate:.1%} of the last {failures.window(concurrency)} attempts failed, and at "
                f"most {failures.max_rate:.0%} may (max_failure_rate); the most frequent error, "
                f"{worst.count} times: {worst!r:.500}. Mend the agent, or what it depends on; with "
                "max_failure_rate=None a run goes on however many fail"
            ) from error
        return kind

    def log(self, kind: Kind, error: Exception, sample: int, item: int) -> None:
        """Log the first error of a kind in full, and later ones as a count."""
        if not kind.is_due():
            return
        if kind.count == 1:
            logger.warning(
                "sample %d of item %d failed: %s: %s",
                sample,
                item,
                type(error).__name__,
                error,
                # The text of a RemoteError contains its traceback. Other errors of sglrl need none.
                exc_info=None if isinstance(error, SglrlError) else error,
            )
        else:
            logger.warning(
                "%d samples have failed with %r, the last one is sample %d of item %d",
                kind.count,
                kind,
                sample,
                item,
            )

    def log_totals(self) -> None:
        """Log at the end of the run each kind whose count has grown since its last log entry."""
        for kind in self._failures.kinds.values():
            if 0 < kind.logged < kind.count:
                kind.logged = kind.count
                logger.warning("in all, %d samples have failed with %r", kind.count, kind)


def place_of(error: Exception) -> str:
    """Return the file and line that raised the error, or "" if they are not known."""
    if isinstance(error, RemoteError):
        frames = _REMOTE_FRAME.findall(error.traceback)
        return ":".join(frames[-1]) if frames else ""
    at = error.__traceback__
    if at is None:
        return ""
    while at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}"


def _name_of(error: Exception) -> str:
    return error.kind if isinstance(error, RemoteError) else type(error).__name__
