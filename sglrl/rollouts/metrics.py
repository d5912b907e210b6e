"""The metrics of a run."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Final

import msgspec

from ..core.rollout_plan import Plan
from .sample_limit import SampleLimit

_RECENT: Final = 256
"""Number of samples for the mean reward."""


class RolloutMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run. Counts are totals, and times are in seconds.

    Attributes:
        groups_taken: groups that were delivered.
        groups_filtered: groups that ``keep`` rejected.
        groups_dropped: groups that were given up for good.
        groups_ready, groups_running: current numbers of groups.
        samples_done: successful samples, without those of groups that were given up.
        samples_running: current number of samples.
        samples_retried: retried samples in total.
        samples_lost: by reason: "error", "timeout", "stale", "given up" (with its group).
        concurrency: current maximum of samples that run at a time.
        turns, generated_tokens, prompt_tokens, cached_tokens: of all turns. Cached tokens are
            prompt tokens that came from the prefix cache.
        mean_reward: over the last 256 samples; NaN without any.
        mean_staleness: of the delivered groups, in policy versions.
        seconds: since the run began.
    """

    groups_taken: int
    groups_filtered: int
    groups_dropped: int
    groups_ready: int
    groups_running: int
    samples_done: int
    samples_running: int
    samples_retried: int
    samples_lost: dict[str, int]
    concurrency: int
    turns: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    mean_reward: float
    mean_staleness: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class MetricsRecorder:
    """Counts the turns, tokens and rewards of one run. Also owns its clock.

    The plan counts samples and groups.
    """

    def __init__(self, plan: Plan, limit: SampleLimit) -> None:
        self._plan = plan
        self._limit = limit
        self._turns = self._prompt_bytes = self._cached = self._new_bytes = 0
        self._rewards: deque[float] = deque(maxlen=_RECENT)
        self._staleness = 0
        """Sum of the staleness of the delivered groups."""
        self._begun_at: float | None = None
        self._ended_at: float | None = None

    def begin(self) -> None:
        self._begun_at = time.monotonic()

    def end(self) -> None:
        """Stop the clock, unless it was stopped before."""
        self._ended_at = self._ended_at or time.monotonic()

    def count_turns(self, prompt_bytes: int, cached: int, new_bytes: int, turns: int = 1) -> None:
        """Count finished turns.

        Args:
            prompt_bytes: bytes of the token ids of their prompts.
            cached: prompt tokens that came from the prefix cache.
            new_bytes: bytes of the token ids that they generated.
        """
        self._turns += turns
        self._prompt_bytes += prompt_bytes
        self._cached += cached
        self._new_bytes += new_bytes

    def count_reward(self, reward: float) -> None:
        self._rewards.append(reward)

    def count_delivered(self, staleness: int) -> None:
        self._staleness += staleness

    def snapshot(self) -> RolloutMetrics:
        plan = self._plan
        # Samples that run when the run ends are neither done nor lost.
        runs = self._ended_at is None
        until = self._ended_at or time.monotonic()
        return RolloutMetrics(
            groups_taken=plan.taken,
            groups_filtered=plan.filtered,
            groups_dropped=plan.dropped,
            groups_ready=len(plan.ready),
            groups_running=len(plan.live) - len(plan.ready) if runs else 0,
            samples_done=plan.samples_done,
            samples_running=plan.running if runs else 0,
            samples_retried=plan.retried,
            samples_lost=dict(plan.lost),
            concurrency=self._limit.value,
            turns=self._turns,
            generated_tokens=self._new_bytes // 4,
            prompt_tokens=self._prompt_bytes // 4,
            cached_tokens=self._cached,
            mean_reward=sum(self._rewards) / len(self._rewards) if self._rewards else math.nan,
            mean_staleness=self._staleness / plan.taken if plan.taken else 0.0,
            seconds=0.0 if self._begun_at is None else until - self._begun_at,
        )
