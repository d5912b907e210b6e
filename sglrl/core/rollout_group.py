"""The samples of one item of the data set, and their states. ``rollout_plan`` changes them."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from .policy_versions import Versions

WAITING: Final = "waiting"
RUNNING: Final = "running"
DONE: Final = "done"
LOST: Final = "lost"

READY: Final = "ready"
TAKEN: Final = "taken"
FILTERED: Final = "filtered"
DROPPED: Final = "dropped"
POSTPONED: Final = "postponed"

STALE: Final = "stale"
"""A reason for the loss of a sample: its oldest token is too old."""
GIVEN_UP: Final = "given up"
"""A reason for the loss of a sample: its group was given up. The caller passes other reasons."""

MAX_LOSSES: Final = 3
"""Maximum number of lost processes per sample that do not count as a run."""
SUSPECT: Final = 2
"""Number of losses after which a sample is a suspect. A suspect runs apart from other suspects, so
that the cause of the next loss is clear."""
MOST_STALE: Final = 3
"""A sample that was stale this often waits, with its group, for the end of the data set. A sample
that is as often stale there is lost."""


class Past(NamedTuple):
    """The earlier runs of a sample, in all groups of its item.

    Attributes:
        number: index of the sample in its group.
        tries: number of earlier runs, without stale ones and those that lost their process.
        losses: how often the process that ran the sample was lost.
        stale: how often the sample was stale.
    """

    number: int
    tries: int = 0
    losses: int = 0
    stale: int = 0


class Sample:
    """One rollout of an item.

    Attributes:
        tries, losses, stale: see ``Past``.
        final: the sample has failed, and another run would fail in the same way.
        lost_by: the reason for the loss, if the sample is LOST.
        oldest: the oldest version of each policy that sampled a token, if it is DONE.
    """

    __slots__ = (
        "final",
        "group",
        "index",
        "losses",
        "lost_by",
        "oldest",
        "result",
        "stale",
        "state",
        "tries",
    )

    def __init__(self, group: Group, past: Past) -> None:
        self.group = group
        self.state = WAITING
        self.index, self.tries, self.losses, self.stale = past
        self.final = False
        self.lost_by = ""
        self.result: Any = None
        self.oldest: Versions = {}

    def __repr__(self) -> str:
        return f"<Sample {self.index} of item {self.group.index}: {self.state}>"

    @property
    def past(self) -> Past:
        return Past(self.index, self.tries, self.losses, self.stale)


class Group:
    """The samples of an item.

    Args:
        index: number of the item in the data set.
        tries: how often a group of the item has failed before.
        before: the earlier runs of each sample.
        late: the group was POSTPONED to the end of the data set before.

    Attributes:
        order: the number of the group among all groups that became READY.
        age_key: the oldest version of each policy, sorted by name, while the group is READY.
    """

    __slots__ = ("age_key", "index", "item", "late", "open", "order", "samples", "state", "tries")

    def __init__(
        self, index: int, item: Any, tries: int, before: list[Past], *, late: bool = False
    ) -> None:
        self.index = index
        self.item = item
        self.state = RUNNING
        self.tries = tries
        self.late = late
        self.samples = [Sample(self, past) for past in before]
        self.order = 0
        self.age_key: tuple[tuple[str, int], ...] = ()
        self.open = len(before)
        """Number of samples that are neither DONE nor LOST."""

    @property
    def done(self) -> list[Sample]:
        return [s for s in self.samples if s.state is DONE]
