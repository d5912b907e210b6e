"""``Group``: the trajectories of one item, which a run delivers."""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.policy_versions import MODEL, age, oldest_of
from ..sessions.trajectory import Trajectory


class Group(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The trajectories of one item of the data set.

    Attributes:
        index: the index of the item in the data set.
        item: the item itself.
        trajectories: the trajectories of the successful samples, in the order of the samples.
        failed: the number of failed samples.
        stale: the number of samples that are lost because they were older than ``max_staleness``.
        version: the policy version of the model when the group was delivered.
        lora_versions: like ``version``, for each LoRA adapter that sampled tokens of the group, by
            name.
    """

    index: int
    item: Any
    trajectories: tuple[Trajectory, ...]
    failed: int
    version: int
    stale: int = 0
    lora_versions: dict[str, int] = {}

    def __repr__(self) -> str:
        stale = f"{self.stale} stale, " if self.stale else ""
        rewards = ", ".join(f"{trajectory.reward:.4g}" for trajectory in self.trajectories)
        return (
            f"<Group of item {self.index}: {len(self.trajectories)} trajectories, {self.failed} "
            f"failed, {stale}rewards [{rewards}]>"
        )

    def _repr_html_(self) -> str:
        shown = [t._repr_html_() or f"<div>{escape(repr(t))}</div>" for t in self.trajectories]
        return f"<div>{escape(repr(self))}</div>{''.join(shown)}"

    @property
    def rewards(self) -> NDArray[np.float32]:
        """The reward of each trajectory, float32 [n]."""
        return np.array([t.reward for t in self.trajectories], np.float32)

    @property
    def oldest_version(self) -> int:
        """The oldest version of the model that sampled a token of the group."""
        return min(t.oldest_version for t in self.trajectories)

    @property
    def staleness(self) -> int:
        """The age of the oldest token, in policy versions, when the group was delivered.

        The age is relative to ``version``. A token that an adapter sampled also has an age relative
        to ``lora_versions``. The larger age counts.
        """
        oldest = oldest_of(t.oldest_versions for t in self.trajectories)
        return age({MODEL: self.version, **self.lora_versions}, oldest)

    @property
    def tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(t.sampled_tokens for t in self.trajectories)
