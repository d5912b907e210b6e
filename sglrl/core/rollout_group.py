"""The samples of one item of the data set, and their states, changed by ``rollout_plan``."""

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
"""Maximum number of runs per sample that do not count because their process was lost."""
SUSPECT: Final = 2
"""Number of lost processes after which a sample is a suspect. A suspect runs apart from other
suspects, so that the cause of the next loss is clear."""
MOST_STALE: Final = 3
"""After this many stale runs of a sample, its group is postponed to the end of the data set. After
as many further stale runs, the sample is lost."""


class Past(NamedTuple):
    """The earlier runs of a sample, in all groups of its item.

    Attributes:
        number: index of the sample in its group.
        tries: number of earlier runs, without stale runs and runs whose process was lost.
        losses: number of earlier runs whose process was lost.
        stale: number of earlier runs in which the sample was stale.
    """

    number: int
    tries: int = 0
    losses: int = 0
    stale: int = 0


class Sample:
    """One rollout of an item.

    Attributes:
        tries, losses, stale: see ``Past``.
        final: whether the sample has failed and another run would fail in the same way.
        lost_by: the reason for the loss, if the sample is LOST.
        oldest: the oldest version of each policy that sampled a token, if the sample is DONE.
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
        tries: number of earlier groups of the item that were DROPPED.
        before: the earlier runs of each sample.
        late: whether an earlier group of the item was POSTPONED to the end of the data set.

    Attributes:
        order: the serial number of the group among all groups that became READY.
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
