"""The versions of the policies that sample in a run: the model, and LoRA adapters of the model.

Each policy has a name and a version counter. ``MODEL`` is the name of the model itself. A token
that an adapter sampled also depends on the weights of the model. This token has two versions, and
its age is the larger of the two ages. For many tokens, it suffices to keep the oldest version of
each policy, because the largest age of the tokens follows from these versions.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

MODEL: Final = ""
"""The name of the model among the names of its adapters."""

Versions = Mapping[str, int]
"""Versions by the name of the policy."""


def oldest_of(all_versions: Iterable[Versions]) -> dict[str, int]:
    """Return the oldest version of each policy."""
    oldest: dict[str, int] = {}
    for versions in all_versions:
        for name, version in versions.items():
            oldest[name] = min(version, oldest.get(name, version))
    return oldest


def age(now: Versions, oldest: Versions) -> int:
    """Return the age of the oldest token, in versions. It is at least 0.

    Args:
        now: the current versions. A policy that is missing has not changed.
        oldest: the oldest version of each policy that sampled a token.
    """
    return max([0, *(now.get(name, version) - version for name, version in oldest.items())])


class PolicyClock:
    """The current versions, and the number of training steps that led to them.

    A trainer may update several policies in one step, for example two adapters. So updates of
    different policies count as one step, unless a group was taken between them. Updates of one
    policy count as one step each. Updates of policies that the run does not use do not count.

    Args:
        versions: the versions at the start of the run.
    """

    def __init__(self, versions: Versions) -> None:
        self.versions = dict(versions)
        self._used = {MODEL}
        self._steps = 0
        """Number of steps before the last group was taken."""
        self._since: dict[str, int] = {}
        """Number of new versions of each policy since the last group was taken."""

    @property
    def steps(self) -> int:
        """Number of training steps since the start of the run."""
        return self._steps + max(self._since.values(), default=0)

    def use(self, names: Iterable[str]) -> None:
        """Count the updates of these policies from now on."""
        self._used.update(names)

    def advance(self, versions: Versions) -> None:
        """Record the versions of new weights."""
        for name, version in versions.items():
            new = version - self.versions.get(name, version)
            if new > 0 and name in self._used:
                self._since[name] = self._since.get(name, 0) + new
        self.versions.update(versions)

    def group_taken(self) -> None:
        """Count the next update of any policy as a new step."""
        self._steps = self.steps
        self._since.clear()

    def age(self, oldest: Versions) -> int:
        """Return the age of the oldest token: see the function ``age``."""
        return age(self.versions, oldest)

    @property
    def used(self) -> dict[str, int]:
        """The current versions of the policies that the run uses."""
        return {name: self.versions[name] for name in sorted(self._used & self.versions.keys())}
