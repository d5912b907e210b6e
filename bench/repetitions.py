"""Plan the repetitions of a system in ``bench.engine``, and collect their rates and latencies."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

import psutil

from .cases import Case
from .load import cpu_seconds, percentile
from .parts import Note

TEMPERATURE = 1.0


class Repetitions:
    """Collects the repetitions of one system.

    Args:
        case: the model and the load.
        begun: the time at which the start of the system began.
        note: shows the user what runs.
    """

    def __init__(self, case: Case, begun: float, note: Note) -> None:
        self.case = case
        self.note = note
        self.start_seconds = time.perf_counter() - begun
        self.rates: list[float] = []
        self.cpu_us: list[float] = []
        self._cpu_before = 0.0
        self.latencies: list[list[float]] = []
        note("warming up")

    def plan(self) -> list[tuple[int, int]]:
        """Return the index of each repetition, with its number of requests.

        The first repetition is the warm-up, with the index -1. It has one full batch of requests.
        """
        case = self.case
        return [(-1, self._warm), *((i, case.requests) for i in range(case.repeats))]

    @property
    def _warm(self) -> int:
        return min(self.case.in_flight, self.case.requests)

    def mark(self) -> None:
        """Store the CPU time. Call this right before the clock of a repetition starts."""
        self._cpu_before = _total_cpu_seconds()

    def add(self, repetition: int, tokens: int, seconds: float, latencies: list[float]) -> None:
        """Record a repetition. The warm-up is checked, but not recorded.

        Raises:
            ValueError: the answers do not have the requested number of tokens.
        """
        # Latencies are per call. The bare loop has no calls, so its latencies are per request.
        expected = self.case.new * (self.case.requests if repetition >= 0 else self._warm)
        if tokens != expected:
            raise ValueError(f"{tokens} tokens with logprobs came back, {expected} were asked for")
        if repetition < 0:
            return
        self.cpu_us.append((_total_cpu_seconds() - self._cpu_before) / tokens * 1e6)
        self.rates.append(tokens / seconds)
        self.latencies.append(latencies)
        self.note(
            f"repetition {repetition + 1} of {self.case.repeats}: {self.rates[-1]:,.0f} tokens/s"
        )

    def result(self) -> dict[str, Any]:
        return {
            "tokens_per_s": statistics.median(self.rates),
            "all_tokens_per_s": self.rates,
            "p50_s": statistics.median(percentile(seen, 50) for seen in self.latencies),
            "p99_s": statistics.median(percentile(seen, 99) for seen in self.latencies),
            "cpu_us_per_token": statistics.median(self.cpu_us),
            "start_s": self.start_seconds,
        }


def _total_cpu_seconds() -> float:
    """Return the CPU time of this process and its children: client, server and engine."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += cpu_seconds(process)
    return total
