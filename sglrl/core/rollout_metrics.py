"""The metrics of a rollout run as data. ``rollouts/metrics.py`` measures them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from .rollout_group import GIVEN_UP, STALE

_LOSSES: Final = ("error", "timeout", STALE, GIVEN_UP)
"""The reasons for the loss of a sample."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution of some values. All attributes are NaN if there are no values.

    Attributes:
        p50, p90, p99: percentiles, interpolated between the nearest values.
    """

    mean: float = math.nan
    p50: float = math.nan
    p90: float = math.nan
    p99: float = math.nan
    max: float = math.nan

    @classmethod
    def of(cls, values: ArrayLike) -> Distribution:
        """Return the distribution of some numbers."""
        array = np.asarray(values, np.float64)
        if not array.size:
            return cls()
        p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
        return cls(mean=float(array.mean()), p50=p50, p90=p90, p99=p99, max=float(array.max()))


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The growth of totals between the two latest deliveries of groups.

    A delivery is a ``take``, a list of ``batches()`` or one group of a loop. The first delivery is
    compared with the beginning of the run. All values are 0 before it.

    Attributes:
        samples_lost: the number of samples lost for any reason.
        seconds: the time between the deliveries.
        Others: see ``RolloutMetrics``.
    """

    groups_taken: int = 0
    groups_filtered: int = 0
    groups_dropped: int = 0
    samples_done: int = 0
    samples_retried: int = 0
    samples_lost: int = 0
    turns: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class RolloutMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a run. Counts are totals, and times are in seconds.

    Distributions and shares describe the latest 1,024 delivered trajectories and groups, and the
    latest 4,096 turns of these. They are NaN without data.

    Attributes:
        groups_taken: groups that were delivered.
        groups_filtered: groups that ``keep`` rejected.
        groups_dropped: groups that were given up and do not begin again.
        groups_stale: dropped groups with a sample that was older than ``max_staleness`` in every
            attempt.
        groups_postponed: groups that wait for the end of the data set, because a sample was older
            than ``max_staleness`` in too many attempts.
        groups_ready, groups_running: the current numbers of groups.
        samples_done: successful samples, without the samples of groups that were given up.
        samples_running: the current number of running samples.
        samples_retried: failed samples that ran again, in total.
        samples_lost: the numbers of lost samples by reason: "error", "timeout", "stale", or "given
            up" (with the group). "stale" counts each attempt whose tokens became older than
            ``max_staleness``. A stale sample runs again without using ``retries``.
        concurrency: the current maximum of samples that run at a time.
        turns, generated_tokens, prompt_tokens, cached_tokens: totals of all turns. Cached tokens
            are prompt tokens that came from the prefix cache.
        mean_reward: the mean reward of the last 256 samples; NaN without any.
        reward_std: the standard deviation of the rewards of delivered trajectories.
        group_reward_std: the mean of the standard deviations of the rewards within each group. Near
            0, the groups have little to learn from.
        named_rewards: the mean of each of ``Trajectory.named_rewards``, over the latest delivered
            trajectories that have it.
        mean_staleness: the mean staleness of the delivered groups, in policy versions.
        response_tokens: the length of a response, with observations.
        truncated: the share of the trajectories whose last turn ended at its token limit
            (``finish_reason`` "length").
        turn_seconds: the duration of a turn.
        tool_seconds: the time between two turns of a trajectory.
        branches: the total number of ``Trajectory.branches`` of delivered trajectories.
        seconds: the time since the run began.
        step: the growth of the totals between the two latest deliveries.
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
    reward_std: float = math.nan
    group_reward_std: float = math.nan
    response_tokens: Distribution = Distribution()
    truncated: float = math.nan
    turn_seconds: Distribution = Distribution()
    tool_seconds: Distribution = Distribution()
    branches: int = 0
    named_rewards: dict[str, float] = msgspec.field(default_factory=dict)
    step: StepMetrics = StepMetrics()
    groups_stale: int = 0
    groups_postponed: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    def flat(self, prefix: str = "rollout/") -> dict[str, float]:
        """Return all metrics as numbers, for loggers such as W&B and TensorBoard.

        The keys are the same in every call, except the keys of named rewards. These appear with
        the first trajectory that has such a reward. Parts of a key are joined with "/", as in
        "rollout/turn_seconds/p90". Values without data are NaN.
        """
        lost = {reason: self.samples_lost.get(reason, 0) for reason in _LOSSES}
        rates = {"tokens_per_second": self.tokens_per_second}
        step_rates = {"step/tokens_per_second": self.step.tokens_per_second}
        values = msgspec.structs.asdict(self) | {"samples_lost": lost} | rates | step_rates
        return {
            prefix + name.replace(" ", "_"): float(value) for name, value in _numbers("", values)
        }


def _numbers(path: str, values: dict[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the paths and the numbers in nested structs and dicts."""
    for name, value in values.items():
        if isinstance(value, msgspec.Struct):
            yield from _numbers(f"{path}{name}/", msgspec.structs.asdict(value))
        elif isinstance(value, dict):
            yield from _numbers(f"{path}{name}/", value)
        else:
            assert isinstance(value, (int, float)), name
            yield path + name, value
