"""The results of a run: groups of trajectories, and metrics."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..sessions.trajectory import Trajectory


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The trajectories of one item of the data set.

    Attributes:
        index: number of the item in the data set.
        item: the item itself.
        trajectories: those of the successful samples, in the order of the samples.
        failed: number of failed samples.
        version: version of the policy when the group was delivered.
    """

    index: int
    item: Any
    trajectories: tuple[Trajectory, ...]
    failed: int
    version: int

    def __repr__(self) -> str:
        return (
            f"<Group of item {self.index}: {len(self.trajectories)} trajectories, {self.failed} "
            f"failed, rewards {self.rewards.round(3).tolist()}>"
        )

    @property
    def rewards(self) -> NDArray[np.float32]:
        """The reward of each trajectory, float32 [n]."""
        return np.array([t.reward for t in self.trajectories], np.float32)

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token."""
        return min(t.oldest_version for t in self.trajectories)

    @property
    def staleness(self) -> int:
        """The age of the oldest token in versions, relative to ``version``."""
        return self.version - self.oldest_version

    @property
    def tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return int(sum(t.loss_mask.sum() for t in self.trajectories))


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
