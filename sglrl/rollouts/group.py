"""What a run hands out, and what it says of itself."""

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
        trajectories: of the samples that ended well, in the order of the samples.
        failed: how many did not.
        version: the policy's when the group was handed out.
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
        """float32 [n]: each trajectory's reward."""
        return np.array([t.reward for t in self.trajectories], np.float32)

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token."""
        return min(t.oldest_version for t in self.trajectories)

    @property
    def staleness(self) -> int:
        """How many versions older than ``version`` the oldest token is."""
        return self.version - self.oldest_version

    @property
    def tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(sum(t.loss_mask.sum() for t in self.trajectories))


class RolloutMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done so far. Counts are totals, times are in seconds.

    Attributes:
        groups_taken, groups_filtered, groups_dropped: handed out; not kept by ``keep``; given up
            for good.
        groups_ready, groups_running: now.
        samples_done: ended well, of groups that were not given up.
        samples_running, samples_retried: now; in all.
        samples_lost: by reason: "error", "timeout", "stale", "given up" (with its group).
        concurrency: how many samples may run at a time, now.
        turns, generated_tokens, prompt_tokens, cached_tokens: of all turns; cached are those prompt
            tokens that came from the prefix cache.
        mean_reward: over the last 256 samples; NaN without any.
        mean_staleness: of the groups that were handed out, in policy versions.
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
