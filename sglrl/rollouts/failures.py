"""Decide how a run reacts to failed samples, and log the failures.

The first error of each kind is logged in full. Later errors of this kind are logged as a count.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from typing import Final

from ..core.failures import Failures, Kind
from ..core.rollout_group import MOST_STALE, Sample
from ..core.rollout_plan import Plan, TooSlow
from ..errors import RemoteError, RolloutFailed, SglrlError, UsageError
from ..wire.codec import readable
from .config import RolloutConfig
from .sample_limit import SampleLimit

logger = logging.getLogger("sglrl.rollout")

_KEPT: Final = 100
"""The number of latest errors that are kept."""
_SUSPECT: Final = 32
"""The run ends after this number of failed attempts if none has succeeded."""
_SHOWN_SLOW: Final = 8
"""The number of slow items that are logged one by one. After them, only each doubling is logged."""
_REMOTE_FRAME = re.compile(r'^  File "(.*)", line (\d+)', re.MULTILINE)


class FailurePolicy:
    """Decides whether a failed sample runs again, is lost, or ends the run. Logs failures.

    Owns the counts of failed and successful attempts, and the latest errors.

    Args:
        limit: the number of samples that may run at a time.

    Attributes:
        errors: the latest errors.
        failed: the number of failed attempts.
    """

    def __init__(self, config: RolloutConfig, limit: SampleLimit) -> None:
        self._on_error = config.on_error
        self._limit = limit
        self._failures = Failures(config.max_failure_rate)
        self.errors: deque[Exception] = deque(maxlen=_KEPT)
        self.failed = self._succeeded = 0
        self._too_slow = {False: 0, True: 0}
        """The number of items that were too slow, by ``TooSlow.lost``."""

    def count_success(self) -> None:
        self._succeeded += 1
        self._failures.attempt(False, self._limit.value)

    def most_frequent(self, most: int) -> list[str]:
        """Return the most frequent errors of failed attempts, with their counts."""
        kinds = sorted(self._failures.kinds.values(), key=lambda kind: -kind.count)
        return [f"{kind.count:,} times {kind!r}" for kind in kinds[:most]]

    def record(self, error: Exception) -> None:
        """Keep an error that does not count as a failure of its sample."""
        self.errors.append(error)

    def count_late(self, error: Exception, sample: Sample) -> None:
        """Count and log an attempt that was too late.

        Raises:
            Exception: ``error`` itself, if 32 attempts have failed and none was successful.
            RolloutFailed: too many of the latest attempts have failed.
        """
        self._log(self._count(error), error, sample)

    def count_failure(self, error: Exception, sample: Sample, *, fatal: bool) -> bool:
        """Count and log a failed attempt. Return whether the sample may run again.

        Args:
            fatal: whether the failure ends the run.

        Raises:
            Exception: ``error`` itself, if it ends the run, or if 32 attempts have failed and none
                was successful.
            RolloutFailed: too many of the latest attempts have failed.
        """
        kind = self._count(error, fatal=fatal or self._on_error == "raise")
        self._log(kind, error, sample)
        return self._on_error == "retry" and not isinstance(error, UsageError)

    def check_end(self) -> None:
        """Raise the latest error if samples have failed and none was successful."""
        if self.failed and not self._succeeded:
            error = self.errors[-1]
            error.add_note(f"and none of the {self.failed} samples was successful")
            raise error

    def log_too_slow(self, slow: TooSlow, plan: Plan) -> None:
        """Log an item that was too slow for the trainer. Log only some of many such items."""
        self._too_slow[slow.lost] += 1
        count = self._too_slow[slow.lost]
        if count > _SHOWN_SLOW and count & (count - 1):
            return
        runs = (2 if slow.lost else 1) * MOST_STALE
        logger.warning(
            "item %d is too slow: a sample was discarded %d times, because it still ran or waited "
            "when its oldest token was more than max_staleness=%d versions old; %s. To train on "
            "such items sooner, pass a larger max_staleness, or make fewer versions: "
            "update_weights(..., same_version=True) for the later parts of an update in parts. "
            "(%d items so far)",
            slow.item,
            runs,
            plan.max_staleness,
            "the sample is lost, because the weights changed although no other item was left"
            if slow.lost
            else "the item is sampled again when no other item is left",
            count,
        )

    def log_totals(self, plan: Plan) -> None:
        """Log the number of dropped and postponed groups, at the end of the run.

        Also log each kind of failure whose count has grown since its last log entry.
        """
        for count, reason in (
            (plan.dropped - plan.dropped_stale, "failed samples"),
            (plan.dropped_stale, "stale samples, which were always older than max_staleness"),
        ):
            if count:
                logger.warning(
                    "%d groups were dropped because of %s, and %d were delivered",
                    count,
                    reason,
                    plan.taken,
                )
        if plan.late:
            logger.warning(
                "%d groups were postponed because of stale samples, and not sampled again before "
                "the run ended; state_dict() has their items as unfinished",
                len(plan.late),
            )
        for kind in self._failures.kinds.values():
            if 0 < kind.logged < kind.count:
                kind.logged = kind.count
                logger.warning("in all, %d samples have failed with %r", kind.count, kind)

    def _count(self, error: Exception, *, fatal: bool = False) -> Kind:
        self.errors.append(error)
        self.failed += 1
        if self.failed >= _SUSPECT and not self._succeeded:
            error.add_note(f"and none of the first {self.failed} samples was successful")
            fatal = True
        if fatal:
            raise error
        failures, concurrency = self._failures, self._limit.value
        kind = failures.count(_name_of(error), place_of(error), _message_of(error))
        rate = failures.attempt(True, concurrency)
        if rate is not None:
            worst = failures.most_frequent()
            assert worst is not None
            raise RolloutFailed(
                f"{rate:.1%} of the last {failures.window(concurrency)} attempts failed, and at "
                f"most {failures.max_rate:.0%} may (max_failure_rate); the most frequent error, "
                f"{worst.count} times: {worst!r:.500}. Correct the agent or its tools; with "
                "max_failure_rate=None a run continues however many fail"
            ) from error
        return kind

    def _log(self, kind: Kind, error: Exception, sample: Sample) -> None:
        """Log the first error of a kind in full, and later ones as a count."""
        if not kind.is_due():
            return
        item = sample.group.index
        if kind.count == 1:
            logger.warning(
                "sample %d of item %d failed: %s: %s",
                sample.index,
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
                sample.index,
                item,
            )


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


def _message_of(error: Exception) -> str:
    message = error.message if isinstance(error, SglrlError) else readable(error)
    return message.removeprefix(f"{error.kind}: ") if isinstance(error, RemoteError) else message


def title_of_error(error: Exception) -> str:
    """Return the name of an error and its message, in one text."""
    return f"{_name_of(error)}: {_message_of(error)}"
