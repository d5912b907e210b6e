"""The metrics of a run: counts, rewards and distributions, for logs and loggers."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..core.rollout_metrics import Distribution, RolloutMetrics, StepMetrics
from ..core.rollout_plan import Plan
from .group import Group
from .sample_limit import SampleLimit

_RECENT: Final = 256
"""The number of latest samples in the mean reward."""
_TRAJECTORIES: Final = 1024
"""Distributions and deviations describe this number of latest trajectories or latest groups."""
_TURNS: Final = 4096
"""The number of latest turns in distributions."""


class _Latest:
    """Keeps the latest ``count`` values, for their mean and their distribution."""

    def __init__(self, count: int) -> None:
        self._values: NDArray[np.float64] = np.zeros(count)
        self._added = 0

    def add(self, value: float) -> None:
        self._values[self._added % len(self._values)] = value
        self._added += 1

    @property
    def values(self) -> NDArray[np.float64]:
        """The kept values, in any order."""
        return self._values[: self._added]

    @property
    def mean(self) -> float:
        return float(self.values.mean()) if self._added else math.nan

    @property
    def std(self) -> float:
        return float(self.values.std()) if self._added else math.nan

    def distribution(self) -> Distribution:
        return Distribution.of(self.values)


class MetricsRecorder:
    """Counts the turns, tokens and rewards of one run, and measures its duration.

    The plan counts samples and groups.
    """

    def __init__(self, plan: Plan, limit: SampleLimit) -> None:
        self._plan = plan
        self._limit = limit
        self._turns = self._prompt_bytes = self._cached = self._new_bytes = 0
        self._rewards: deque[float] = deque(maxlen=_RECENT)
        self.staleness: Counter[int] = Counter()
        """The number of delivered groups by their staleness."""
        self._staleness = 0
        """The sum of the staleness of the delivered groups."""
        self._all_rewards = _Latest(_TRAJECTORIES)
        self._named_rewards: dict[str, _Latest] = {}
        self._group_stds = _Latest(_TRAJECTORIES)
        self._lengths = _Latest(_TRAJECTORIES)
        self._truncated = _Latest(_TRAJECTORIES)
        self._turn_seconds = _Latest(_TURNS)
        self._tool_seconds = _Latest(_TURNS)
        self._branches = 0
        self._step = StepMetrics()
        self._delivered: dict[str, Any] = {}
        """The totals at the latest delivery."""
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
            prompt_bytes: the size of the prompts' token ids in bytes.
            cached: the number of prompt tokens that came from the prefix cache.
            new_bytes: the size of the generated token ids in bytes.
            turns: the number of finished turns.
        """
        self._turns += turns
        self._prompt_bytes += prompt_bytes
        self._cached += cached
        self._new_bytes += new_bytes

    def count_reward(self, reward: float) -> None:
        self._rewards.append(reward)

    def count_taken(self, group: Group) -> None:
        """Record a group that was taken from the plan for a consumer."""
        self._staleness += group.staleness
        self.staleness[group.staleness] += 1
        rewards = [trajectory.reward for trajectory in group.trajectories]
        mean = sum(rewards) / len(rewards)
        self._group_stds.add(math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards)))
        for trajectory in group.trajectories:
            self._all_rewards.add(trajectory.reward)
            for name, value in trajectory.named_rewards.items():
                self._named_rewards.setdefault(name, _Latest(_TRAJECTORIES)).add(value)
            self._branches += len(trajectory.branches)
            for leaf in (*trajectory.branches, trajectory):
                self._lengths.add(len(leaf.response_ids))
                turns = leaf.turns
                self._truncated.add(bool(turns) and turns[-1].finish_reason == "length")
                for turn in turns:
                    self._turn_seconds.add(turn.seconds)
                for turn in turns[1:]:
                    self._tool_seconds.add(turn.seconds_before)

    def count_delivery(self) -> None:
        """Record a delivery to the consumer, and compute the metrics of the step that ends."""
        totals = self._totals()
        totals["samples_lost"] = self._plan.lost.total()
        before, self._delivered = self._delivered, totals
        self._step = StepMetrics(**{name: totals[name] - before.get(name, 0) for name in totals})

    def _totals(self) -> dict[str, Any]:
        """Return the totals. ``StepMetrics`` has the differences between two such results."""
        plan = self._plan
        until = self._ended_at or time.monotonic()
        return {
            "groups_taken": plan.taken,
            "groups_filtered": plan.filtered,
            "groups_dropped": plan.dropped,
            "samples_done": plan.samples_done,
            "samples_retried": plan.retried,
            "turns": self._turns,
            "generated_tokens": self._new_bytes // 4,
            "prompt_tokens": self._prompt_bytes // 4,
            "cached_tokens": self._cached,
            "seconds": 0.0 if self._begun_at is None else until - self._begun_at,
        }

    def snapshot(self) -> RolloutMetrics:
        plan = self._plan
        # Samples that run when the run ends are neither done nor lost.
        runs = self._ended_at is None
        return RolloutMetrics(
            **self._totals(),
            groups_ready=len(plan.ready),
            groups_running=len(plan.live) - len(plan.ready) if runs else 0,
            samples_running=plan.running if runs else 0,
            samples_lost=dict(plan.lost),
            groups_stale=plan.dropped_stale,
            groups_postponed=len(plan.late),
            concurrency=self._limit.value,
            mean_reward=sum(self._rewards) / len(self._rewards) if self._rewards else math.nan,
            mean_staleness=self._staleness / plan.taken if plan.taken else 0.0,
            reward_std=self._all_rewards.std,
            group_reward_std=self._group_stds.mean,
            response_tokens=self._lengths.distribution(),
            truncated=self._truncated.mean,
            turn_seconds=self._turn_seconds.distribution(),
            tool_seconds=self._tool_seconds.distribution(),
            branches=self._branches,
            named_rewards={name: values.mean for name, values in self._named_rewards.items()},
            step=self._step,
        )
