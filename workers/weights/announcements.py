"""Announce to the engine that an update is about to arrive, so that it delays its next step."""

from __future__ import annotations

import torch

from sglrl.weights.link import Link

from .staging import Update
from .weight_engine import WeightEngine


class Announcements:
    """Announces updates about one step before all of their buckets have arrived."""

    def __init__(self, engine: WeightEngine) -> None:
        self._engine = engine
        self._rate = 0.0
        """Bytes per second of the last update that was received into spare memory."""

    def at_once(self, update: Update) -> bool:
        """Announce the update immediately, if it is expected to take less than two steps.

        The estimate uses the rate of the last update. For a short update, a later announcement
        could come after the launch of another step.

        Returns:
            True if no later announcement is needed.
        """
        if update.drained:
            # The engine is already held.
            return True
        seconds = update.layout.total / self._rate if self._rate else float("inf")
        if seconds > 2 * self._engine.step_seconds():
            return False
        self._engine.nearly_staged(seconds, True)
        return True

    def watch(self, link: Link, update: Update, arrivals: list[torch.cuda.Event]) -> None:
        """Wait for buckets, and announce the update about one step before the last one arrives."""
        sizes = update.layout.sizes
        middle = len(arrivals) // 2
        arrivals[middle].synchronize()
        # Measure with the GPU's clock, because this thread may run late.
        took = arrivals[0].elapsed_time(arrivals[middle]) / 1e3
        rate = sum(sizes[1 : middle + 1]) / max(1e-6, took)
        ahead = self._engine.step_seconds() * rate
        near = middle
        while near < len(sizes) - 1 and sum(sizes[near + 2 :]) >= ahead:
            near += 1
        arrivals[near].synchronize()
        link.check()
        # A single bucket gives no rate to predict from, and needs no prediction.
        left = sum(sizes[near + 1 :]) / rate if rate else 0.0
        self._engine.nearly_staged(left, update.spare is not None)

    def measured(self, update: Update, arrivals: list[torch.cuda.Event]) -> None:
        """Record the rate of an update when all of its buckets have arrived."""
        if len(arrivals) > 1:
            took = arrivals[0].elapsed_time(arrivals[-1]) / 1e3
            self._rate = sum(update.layout.sizes[1:]) / max(1e-6, took)


def arrival() -> torch.cuda.Event:
    """Record an event on the current stream. It completes after the work launched there before."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
