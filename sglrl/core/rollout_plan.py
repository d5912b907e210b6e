"""The plan of a run: the samples to run, and the groups to return or drop.

The samples of one item of the data set are a group. The life of one group::

    item ──begin──▶ RUNNING ──every sample done or lost──▶ READY ──take──▶ TAKEN
      ▲                │                                     │  ╲
      │                │ too few samples are left            │   ▶ FILTERED
      └──once more─────┴──▶ DROPPED ◀───── too old ──────────┘

The life of one sample: WAITING ──▶ RUNNING ──▶ DONE or LOST. A failed sample may return to WAITING.

A sample of an item runs at most ``1 + retries`` times in all groups of the item. A group that is
begun again has the samples of the previous group, except samples without a remaining run. A run
whose process was lost does not count, at most ``MOST_LOSSES`` times.

Staleness is bounded as in AReaL (https://arxiv.org/abs/2505.24298, eq. 3). With policy version v,
batches of B groups and a bound of η versions, at most ``(v + η + 1) B`` groups have been begun and
not given up. This limit is sufficient only if groups finish in order. Therefore, when new weights
arrive, samples whose oldest token is more than η versions old are lost too, whether they run or are
done.

Pure: no clock, no I/O. Results are opaque, versions are integers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any, Final

WAITING: Final = "waiting"
RUNNING: Final = "running"
DONE: Final = "done"
LOST: Final = "lost"

READY: Final = "ready"
TAKEN: Final = "taken"
FILTERED: Final = "filtered"
DROPPED: Final = "dropped"

STALE: Final = "stale"
"""A reason for the loss of a sample: its oldest token is too old."""
MOST_LOSSES: Final = 3
"""Maximum number of lost processes per sample that do not count as a run."""
SUSPECT: Final = 2
"""Number of losses after which a sample is a suspect. A suspect runs apart from other suspects, so
that the cause of the next loss is clear."""
GIVEN_UP: Final = "given up"
"""A reason for the loss of a sample: its group was given up. The caller passes other reasons."""


class Sample:
    """One rollout of an item.

    Attributes:
        tries: number of earlier runs, in all groups of the item.
        losses: how often the process that ran the sample was lost.
        final: the sample has failed, and another run would fail in the same way.
        oldest: the policy version of its oldest token, if it is DONE.
    """

    __slots__ = ("final", "group", "index", "losses", "oldest", "result", "state", "tries")

    def __init__(self, group: Group, index: int, tries: int, losses: int) -> None:
        self.group = group
        self.index = index
        self.state = WAITING
        self.tries = tries
        self.losses = losses
        self.final = False
        self.result: Any = None
        self.oldest = 0

    def __repr__(self) -> str:
        return f"<Sample {self.index} of item {self.group.index}: {self.state}>"


class Group:
    """The samples of an item.

    Args:
        index: number of the item in the data set.
        tries: how often a group of the item was begun before.
        before: index, tries and losses of each sample.

    Attributes:
        oldest: the policy version of the oldest token, while the group is READY.
    """

    __slots__ = ("index", "item", "oldest", "open", "samples", "state", "tries")

    def __init__(
        self, index: int, item: Any, tries: int, before: list[tuple[int, int, int]]
    ) -> None:
        self.index = index
        self.item = item
        self.state = RUNNING
        self.tries = tries
        self.samples = [Sample(self, i, tried, losses) for i, tried, losses in before]
        self.oldest = 0
        self.open = len(before)
        """Number of samples that are neither DONE nor LOST."""

    @property
    def done(self) -> list[Sample]:
        return [s for s in self.samples if s.state is DONE]


class Plan:
    """The state of one run.

    Args:
        group_size: number of samples per item.
        min_group: a group with fewer remaining samples is given up.
        retries: how often a sample is run again, in all groups. This is also how often a group that
            was given up is begun again, as long as enough of its samples may be run again.
        batch_size: B in the docstring of the module.
        max_staleness: η in the docstring of the module; None for no bound.
        ahead: no further group is begun while at least this many groups are READY.
        version: the current policy version.
    """

    def __init__(
        self,
        *,
        group_size: int = 1,
        min_group: int = 1,
        retries: int = 2,
        batch_size: int | None = None,
        max_staleness: int | None = None,
        ahead: int = 1,
        version: int = 0,
    ) -> None:
        self.group_size = group_size
        self.min_group = min_group
        self.retries = retries
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.ahead = ahead
        self.version = self.first_version = version
        self.live: dict[Group, None] = {}
        """Groups that are RUNNING or READY."""
        self.ready: dict[Group, None] = {}
        self.by_age: dict[int, OrderedDict[Group, None]] = {}
        """READY groups by the version of their oldest token, in order of completion. Groups are
        taken from the front. An ``OrderedDict`` finds its first key at once, but a plain dict first
        passes over all removed keys."""
        self.lessened: dict[Group, None] = {}
        """READY groups that have lost samples since they became READY."""
        self.waiting: deque[Sample] = deque()
        self.suspects: deque[Sample] = deque()
        """Waiting samples with at least ``SUSPECT`` losses."""
        self.again: deque[tuple[int, Any, int, list[tuple[int, int, int]]]] = deque()
        """Items of groups that were given up. Each entry has the number, the item, how often the
        item was begun, and the index, tries and losses of each sample that may be run again."""
        self.running = 0
        self.next_index = 0
        self.exhausted = False
        """Whether the data set has no further item."""
        self.taken = self.filtered = self.dropped = 0
        self.samples_done = self.retried = 0
        self.lost: Counter[str] = Counter()
        """Number of lost samples, by reason."""

    # --- groups -----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether no sample is left to run and no group is left to take."""
        return self.exhausted and not self.live and not self.again

    def may_begin(self) -> bool:
        """Return True if one more group may be begun now."""
        if len(self.ready) >= self.ahead:
            return False
        if self.max_staleness is None:
            return True
        assert self.batch_size is not None
        passed = self.version - self.first_version
        allowed = (passed + self.max_staleness + 1) * self.batch_size
        return self.taken + len(self.live) < allowed

    def begin(self, index: int, item: Any) -> Group:
        """Begin the group of an item. ``index`` is the number of the item in the data set."""
        self.next_index = max(self.next_index, index + 1)
        return self._begin(index, item, 0, [(i, 0, 0) for i in range(self.group_size)])

    def begin_again(self) -> Group | None:
        """Begin a new group for the next item whose group was given up, if there is one."""
        return self._begin(*self.again.popleft()) if self.again else None

    def _begin(
        self, index: int, item: Any, tries: int, before: list[tuple[int, int, int]]
    ) -> Group:
        group = Group(index, item, tries, before)
        self.live[group] = None
        for sample in group.samples:
            self._queue_of(sample).append(sample)
        return group

    def advance(self, version: int) -> None:
        """Set the version of new weights. Lose the done samples that are now too old."""
        self.version = version
        if self.max_staleness is None:
            return
        for group in list(self.live):
            for sample in group.done:
                # The loss of an earlier sample may have dropped the group, and with it this sample.
                if sample.state is DONE and self._too_old(sample.oldest):
                    self.samples_done -= 1
                    self._lose(sample, STALE)

    def take(self) -> Group | None:
        """Take the READY group with the oldest tokens. Among equals, take the first completed."""
        if not self.ready:
            return None
        group = next(iter(self.by_age[min(self.by_age)]))
        self._leave(group, TAKEN)
        self.taken += 1
        return group

    def next_lessened(self) -> Group | None:
        """Return a READY group that has lost samples and is not yet filtered or kept, if any."""
        return next(iter(self.lessened), None)

    def keep(self, group: Group) -> None:
        """Keep a group that has lost samples, with its remaining samples."""
        del self.lessened[group]

    def filter(self, group: Group) -> None:
        """Discard a READY group. Another group may replace it."""
        self._leave(group, FILTERED)
        self.filtered += 1

    def unfinished(self) -> list[int]:
        """Return the numbers of begun items that are not taken, filtered or finally dropped."""
        return sorted({g.index for g in self.live} | {index for index, _, _, _ in self.again})

    # --- samples ----------------------------------------------------------------------------------

    def start(self, *, suspect: bool = False) -> Sample | None:
        """Start and return the next sample, if any. It may be a suspect only with ``suspect``."""
        if suspect and self.suspects:
            sample = self.suspects.popleft()
        elif self.waiting:
            sample = self.waiting.popleft()
        else:
            return None
        sample.state = RUNNING
        self.running += 1
        return sample

    def done(self, sample: Sample, result: Any, oldest: int) -> Group | None:
        """Record the result of a running sample. Return its group if the group is READY now."""
        assert sample.state is RUNNING, sample
        self.running -= 1
        sample.result, sample.oldest = result, oldest
        if sample.group.state is not RUNNING:
            self._lose(sample, GIVEN_UP)
        elif self._too_old(oldest):
            self._lose(sample, STALE)
        else:
            sample.state = DONE
            self.samples_done += 1
            sample.group.open -= 1
            self._settle(sample.group)
        return sample.group if sample.group.state is READY else None

    def failed(
        self, sample: Sample, reason: str, *, retry: bool, final: bool = False
    ) -> Group | None:
        """Record that a running sample failed or was given up.

        Args:
            retry: run the sample again in its group.
            final: do not run the sample again, even if the group is begun again.

        Returns:
            the group of the sample if the group is READY now; otherwise None.
        """
        assert sample.state is RUNNING, sample
        self.running -= 1
        sample.final = final
        if retry and sample.tries < self.retries and sample.group.state is RUNNING:
            sample.tries += 1
            sample.state = WAITING
            self.retried += 1
            # Run it next, because the rest of its group waits for it.
            self._queue_of(sample).appendleft(sample)
            return None
        self._lose(sample, reason)
        return sample.group if sample.group.state is READY else None

    def interrupted(self, sample: Sample) -> bool:
        """Requeue a running sample whose process was lost.

        The sample may not be the cause, so the lost run does not count as a try.

        Returns:
            False if the sample has lost its process too often, or if its group was given up. The
            caller then calls ``condemned``.
        """
        assert sample.state is RUNNING, sample
        if sample.losses >= MOST_LOSSES or sample.group.state is not RUNNING:
            return False
        self.running -= 1
        sample.losses += 1
        sample.state = WAITING
        self.retried += 1
        self._queue_of(sample).appendleft(sample)
        return True

    def condemned(self, sample: Sample, reason: str) -> None:
        """Give up the group of a running sample that has lost its process too often.

        The group is not begun again, because its other samples would fail in the same way.
        """
        assert sample.state is RUNNING, sample
        group = sample.group
        self.running -= 1
        if group.state is RUNNING:
            self._drop(group, again=False)
        self._lose(sample, reason)

    def _queue_of(self, sample: Sample) -> deque[Sample]:
        return self.suspects if sample.losses >= SUSPECT else self.waiting

    def is_stale(self, sample: Sample, oldest: int | None) -> bool:
        """Return True if a running sample is no longer useful.

        This is the case if its group was given up, or if its oldest token is too old.

        Args:
            oldest: the policy version of its oldest token so far; None if it has no token.
        """
        return sample.group.state is not RUNNING or (oldest is not None and self._too_old(oldest))

    # --- inside -----------------------------------------------------------------------------------

    def _too_old(self, version: int) -> bool:
        return self.max_staleness is not None and self.version - version > self.max_staleness

    def _lose(self, sample: Sample, reason: str) -> None:
        was_done = sample.state is DONE
        sample.state = LOST
        sample.result = None
        self.lost[reason] += 1
        group = sample.group
        if not was_done:
            group.open -= 1
        if group.state is RUNNING or group.state is READY:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """Make a group READY if it has no open samples. Drop it if too few samples are left."""
        left = sum(s.state is not LOST for s in group.samples)
        if left < self.min_group:
            self._drop(group)
        elif not group.open:
            if group.state is READY:
                # The group has lost its oldest sample.
                self._unready(group)
                self.lessened[group] = None
            group.state = READY
            group.oldest = min(s.oldest for s in group.samples if s.state is DONE)
            self.ready[group] = None
            peers = self.by_age.get(group.oldest)
            if peers is None:
                peers = self.by_age[group.oldest] = OrderedDict()
            peers[group] = None

    def _drop(self, group: Group, again: bool = True) -> None:
        """Drop a group. Its running samples continue, but their results are not used.

        Args:
            again: begin the group again, if it still has a retry and enough samples that may be run
                again.
        """
        self._leave(group, DROPPED)
        left = []
        for sample in group.samples:
            tries = sample.tries if sample.state is WAITING else sample.tries + 1
            if tries <= self.retries and not sample.final:
                left.append((sample.index, tries, sample.losses))
            if sample.state is DONE:
                self.samples_done -= 1
            if sample.state is WAITING or sample.state is DONE:
                if sample.state is WAITING:
                    self._queue_of(sample).remove(sample)
                sample.state = LOST
                self.lost[GIVEN_UP] += 1
        if again and group.tries < self.retries and len(left) >= self.min_group:
            self.again.append((group.index, group.item, group.tries + 1, left))
        else:
            self.dropped += 1

    def _unready(self, group: Group) -> None:
        del self.ready[group]
        peers = self.by_age[group.oldest]
        del peers[group]
        if not peers:
            del self.by_age[group.oldest]

    def _leave(self, group: Group, state: str) -> None:
        if group.state is READY:
            self._unready(group)
            self.lessened.pop(group, None)
        group.state = state
        del self.live[group]

    def validate(self) -> None:
        """Raise ``AssertionError`` if the state is inconsistent. For tests."""
        assert set(self.ready) == {g for g in self.live if g.state is READY}
        by_age = [(age, g) for age, groups in self.by_age.items() for g in groups]
        assert set(by_age) == {(g.oldest, g) for g in self.ready}
        assert all(self.by_age.values())
        assert set(self.lessened) <= set(self.ready)
        for group in self.live:
            assert group.state in (RUNNING, READY)
            open_ = [s for s in group.samples if s.state in (WAITING, RUNNING)]
            assert group.open == len(open_), group.samples
            assert (group.state is READY) == (not open_)
            if group.state is READY:
                assert group.oldest == min(s.oldest for s in group.done)
            assert sum(s.state is not LOST for s in group.samples) >= self.min_group
        waiting = [s for g in self.live for s in g.samples if s.state is WAITING]
        assert len(waiting) == len(self.waiting) + len(self.suspects)
        assert set(waiting) == {*self.waiting, *self.suspects}
        assert all(s.losses >= SUSPECT for s in self.suspects)
