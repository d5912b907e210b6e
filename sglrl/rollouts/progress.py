"""Show the progress of a run: a live line on a terminal, or a log line every 10 seconds."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from ..core.rollout_group import STALE
from ..core.rollout_metrics import RolloutMetrics
from ..inference.display import can_redraw

logger = logging.getLogger("sglrl.rollout")

SHOWN_SECONDS = 0.2
LOGGED_SECONDS = 10.0


class RolloutProgress:
    """Shows the metrics of a run on the terminal or in the log.

    Args:
        total: the number of items of the data set, or None if it is not known.
        wanted: whether to show progress. None: only on a terminal.
    """

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        terminal = can_redraw(sys.stderr)
        self._total = total
        self._wanted = terminal if wanted is None else wanted
        self._terminal = terminal
        self._bar: Any = None
        self._line: Any = None
        self._next = 0.0

    def begin(self) -> None:
        if not (self._wanted and self._terminal):
            return
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        # On a narrow terminal, only the description is cut.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._bar = Progress(
            TextColumn("rollouts"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", markup=False, table_column=rest),
            console=Console(stderr=True),
            expand=True,
        )
        self._line = self._bar.add_task("", total=self._total)
        self._bar.start()

    def show(self, metrics: Callable[[], RolloutMetrics]) -> None:
        """Draw the metrics if enough time has passed since the last time."""
        if not self._wanted:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (LOGGED_SECONDS if self._bar is None else SHOWN_SECONDS)
        self._draw(metrics())

    def end(self, metrics: RolloutMetrics) -> None:
        if self._wanted:
            self._draw(metrics)
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, metrics: RolloutMetrics) -> None:
        text = describe(metrics, self._total)
        if self._bar is None:
            logger.info("%s", text)
            return
        done = metrics.groups_taken + metrics.groups_filtered + metrics.groups_dropped
        self._bar.update(self._line, completed=done, description=text)


def describe(metrics: RolloutMetrics, total: int | None = None) -> str:
    """Return the metrics as one line.

    Args:
        total: the number of items of the data set, or None if it is not known.
    """
    done = metrics.groups_taken
    parts = [
        f"{done} groups taken" if total is None else f"{done} of {total} groups taken",
        f"reward {metrics.mean_reward:.3f}",
        f"{metrics.samples_running} of {metrics.concurrency} samples running",
        f"{metrics.tokens_per_second:,.0f} tokens/s",
    ]
    if metrics.groups_ready:
        parts.append(f"{metrics.groups_ready} groups ready")
    if metrics.mean_staleness:
        parts.append(f"staleness {metrics.mean_staleness:.2f}")
    stale = metrics.samples_lost.get(STALE, 0)
    lost = sum(metrics.samples_lost.values()) - stale
    if lost or metrics.groups_filtered:
        parts.append(f"{lost} samples lost, {metrics.groups_filtered} groups filtered")
    if metrics.groups_dropped:
        parts.append(f"{metrics.groups_dropped} groups dropped")
    if stale:
        parts.append(f"{stale} samples stale")
    return ", ".join(parts)
