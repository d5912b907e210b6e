"""The plan of a run: the samples to run, and the groups to return or drop.

The samples of one item of the data set are a group. The life of one group::

    item ──begin──▶ RUNNING ──every sample done or lost──▶ READY ──take──▶ TAKEN
      ▲             ▲  │                                     │  ╲
      │             │  │ too few samples are left            │   ▶ FILTERED
      │             └──┼───────── a sample is too old ───────┤
      ├──once more─────┴──▶ DROPPED                          │
      └──at the end───────▶ POSTPONED ◀── too often too old ─┘

The life of one sample: WAITING ──▶ RUNNING ──▶ DONE or LOST. A failed sample may return to WAITING.

A sample of an item runs at most ``1 + retries`` times in all groups of the item. A group that is
begun again has the samples of the previous group, except samples without a remaining run. A run
that lost its process does not count, up to ``MAX_LOSSES`` times for each sample.

Staleness is bounded as in AReaL (https://arxiv.org/abs/2505.24298, eq. 3). After v training steps,
with batches of B groups and a bound of η versions, at most ``(v + η + 1) B`` groups have been begun
and not given up. This limit is sufficient only if groups finish in order. Therefore, when new
weights arrive, samples whose oldest token is more than η versions old are stale, whether they run
or are done.

A stale sample has not failed. It runs again at once, before all others, so that the new run has the
largest possible number of versions to finish. Long samples are stale more often than short ones, so
dropping them would bias the training. After ``MOST_STALE`` stale runs of a sample, its group is
POSTPONED until no other item is left. The trainer then has nothing else to train on, and should
make no new weights before the group ends. If the sample is stale ``MOST_STALE`` more times, the
trainer makes new weights without groups, so the sample is lost.

Pure: no clock, no I/O. Results are opaque. ``policy_versions`` describes versions.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

from .policy_versions import MODEL, PolicyClock, Versions, oldest_of
from .rollout_group import (
    DONE,
    DROPPED,
    FILTERED,
    GIVEN_UP,
    LOST,
    MAX_LOSSES,
    MOST_STALE,
    POSTPONED,
    READY,
    RUNNING,
    STALE,
    SUSPECT,
    TAKEN,
    WAITING,
    Group,
    Past,
    Sample,
)


class _Item(NamedTuple):
    """An item whose group is to be begun or begun again: the arguments of ``Group``."""

    number: int
    item: Any
    tries: int
    before: list[Past]
    late: bool


class TooSlow(NamedTuple):
    """A report about a sample that was stale too often.

    Attributes:
        item: number of the sample's item.
        lost: whether the sample is lost. If not, its group is postponed.
    """

    item: int
    lost: bool


class Plan:
    """The state of one run.

    Args:
        group_size: number of samples per item.
        min_group: minimum number of samples of a group. A group with fewer remaining samples is
            given up.
        retries: maximum number of times that a sample is run again, in all groups, and that a
            DROPPED group is begun again.
        batch_size: B in the docstring of the module.
        max_staleness: η in the docstring of the module; None for no bound.
        ahead: maximum number of live groups, and so of READY groups. None: no bound.
        most_ready: no further group is begun while at least this many groups are READY.
        versions: the current policy versions.

    Attributes:
        wanted: number of groups that a consumer waits for. ``ahead`` and ``most_ready`` count as at
            least this number.
        too_slow: reports about samples. The caller reads and removes them.
    """

    def __init__(
        self,
        *,
        group_size: int = 1,
        min_group: int = 1,
        retries: int = 2,
        batch_size: int | None = None,
        max_staleness: int | None = None,
        ahead: int | None = None,
        most_ready: int = 64,
        versions: Versions | None = None,
    ) -> None:
        self.group_size = group_size
        self.min_group = min_group
        self.retries = retries
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.ahead = ahead
        self.most_ready = most_ready
        self.wanted = 0
        self.clock = PolicyClock(versions or {MODEL: 0})
        self.live: dict[Group, None] = {}
        """Groups that are RUNNING or READY."""
        self.ready: dict[Group, None] = {}
        self.by_age: dict[tuple[tuple[str, int], ...], OrderedDict[Group, None]] = {}
        """READY groups by ``Group.age_key``, in order of completion. Groups are taken from the
        front. An ``OrderedDict`` finds its first key at once, but a plain dict first passes over
        all removed keys."""
        self.lessened: dict[Group, None] = {}
        """READY groups that have lost samples since they became READY."""
        self.waiting: deque[Sample] = deque()
        self.suspects: deque[Sample] = deque()
        """Waiting samples with at least ``SUSPECT`` losses."""
        self.again: deque[_Item] = deque()
        """Items of groups that were given up, with the samples that may be run again."""
        self.late: deque[_Item] = deque()
        """Items of groups that were postponed until no other item is left."""
        self.too_slow: deque[TooSlow] = deque()
        self.running = 0
        self.next_index = 0
        self.exhausted = False
        """Whether the data set has no further item."""
        self.completed = 0
        """Number of times that a group became READY."""
        self.taken = self.filtered = self.dropped = 0
        self.dropped_stale = 0
        """Number of dropped groups that had a sample whose reason for the loss was STALE."""
        self.samples_done = self.retried = 0
        self.lost: Counter[str] = Counter()
        """Number of lost samples, by reason. Stale runs count even if the sample runs again."""

    # --- groups -----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether no sample is left to run and no group is left to take."""
        return self.exhausted and not (self.live or self.again or self.late)

    @property
    def ending(self) -> bool:
        """Whether no further group will become READY."""
        begun = self.exhausted and not (self.again or self.late)
        return begun and len(self.live) == len(self.ready)

    @property
    def version(self) -> int:
        """The current version of the model."""
        return self.clock.versions[MODEL]

    def may_begin(self) -> bool:
        """Return True if one more group may be begun now."""
        if self.ahead is not None and len(self.live) >= max(self.ahead, self.wanted):
            return False
        if len(self.ready) >= max(self.most_ready, self.wanted):
            return False
        return not self.needs_weights()

    def needs_weights(self) -> bool:
        """Return True if no further group may begin before there are new weights."""
        if self.max_staleness is None:
            return False
        assert self.batch_size is not None
        allowed = (self.clock.steps + self.max_staleness + 1) * self.batch_size
        return self.taken + len(self.live) >= allowed

    def begin(self, index: int, item: Any) -> Group:
        """Begin the group of an item. ``index`` is the number of the item in the data set."""
        self.next_index = max(self.next_index, index + 1)
        before = [Past(i) for i in range(self.group_size)]
        return self._begin(_Item(index, item, 0, before, False))

    def begin_again(self) -> Group | None:
        """Begin a new group for the next item whose group was given up, if there is one."""
        if self.again:
            return self._begin(self.again.popleft())
        if self.late and self.exhausted and all(g.late or g.state is READY for g in self.live):
            return self._begin(self.late.popleft())
        return None

    def _begin(self, item: _Item) -> Group:
        index, value, tries, before, late = item
        group = Group(index, value, tries, before, late=late)
        self.live[group] = None
        for sample in group.samples:
            self._queue_of(sample).append(sample)
        return group

    def advance(self, versions: Versions) -> None:
        """Record the versions of new weights. Run DONE samples again if they are now too old."""
        self.clock.advance(versions)
        if self.max_staleness is None:
            return
        for group in list(self.live):
            for sample in group.done:
                # An earlier sample may have made the plan give up the group. This one is then LOST.
                if sample.state is DONE and self._too_old(sample.oldest):
                    self._stale(sample)

    def take(self) -> Group | None:
        """Take the READY group with the oldest tokens. Among equals, take the first completed."""
        if not self.ready:
            return None
        key = max(self.by_age, key=self._precedence)
        group = next(iter(self.by_age[key]))
        self._leave(group, TAKEN)
        self.taken += 1
        self.clock.group_taken()
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
        given_up = {one.number for one in (*self.again, *self.late)}
        return sorted({group.index for group in self.live} | given_up)

    # --- samples ----------------------------------------------------------------------------------

    def start(self, *, suspect: bool = False) -> Sample | None:
        """Start and return the next sample, if any. Consider suspects only with ``suspect``."""
        if suspect and self.suspects:
            sample = self.suspects.popleft()
        elif self.waiting:
            sample = self.waiting.popleft()
        else:
            return None
        sample.state = RUNNING
        self.running += 1
        return sample

    def done(self, sample: Sample, result: Any, oldest: Versions) -> Group | None:
        """Record the result of a running sample. Return its group if the group is READY now."""
        assert sample.state is RUNNING, sample
        self.running -= 1
        self.clock.use(oldest)
        sample.result, sample.oldest = result, oldest
        if sample.group.state is not RUNNING:
            self._lose(sample, GIVEN_UP)
        elif self._too_old(oldest):
            self._stale(sample)
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
            reason: the reason for the loss. A STALE sample runs again, whatever ``retry`` is.
            retry: whether to run the sample again in its group.
            final: whether the sample never runs again, even if the group is begun again.

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
        if reason == STALE and sample.group.state is RUNNING:
            self._stale(sample)
        else:
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
        if sample.losses >= MAX_LOSSES or sample.group.state is not RUNNING:
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

    def is_stale(self, sample: Sample, oldest: Versions) -> bool:
        """Return True if a running sample is no longer useful.

        This is the case if its group was given up, or if its oldest token is too old.

        Args:
            oldest: the oldest version of each policy that has sampled a token so far.
        """
        self.clock.use(oldest)
        return sample.group.state is not RUNNING or self._too_old(oldest)

    # --- inside -----------------------------------------------------------------------------------

    def _too_old(self, oldest: Versions) -> bool:
        return self.max_staleness is not None and self.clock.age(oldest) > self.max_staleness

    def _precedence(self, key: tuple[tuple[str, int], ...]) -> tuple[int, int]:
        """Return the precedence of the groups with this ``age_key``. The largest is taken first."""
        return self.clock.age(dict(key)), -next(iter(self.by_age[key])).order

    def _stale(self, sample: Sample) -> None:
        """Run a stale sample of a live group again, postpone its group, or lose the sample."""
        group, was_done = sample.group, sample.state is DONE
        sample.stale += 1
        sample.result = None
        self.samples_done -= was_done
        if group.late and sample.stale >= 2 * MOST_STALE:
            self.too_slow.append(TooSlow(group.index, lost=True))
            sample.final = True
            self._lose(sample, STALE)
            return
        self.lost[STALE] += 1
        if group.state is READY:
            self._unready(group)
            group.state = RUNNING
        sample.state = WAITING
        group.open += was_done
        # Run it next, because the rest of its group waits for it.
        self._queue_of(sample).appendleft(sample)
        if not group.late and sample.stale >= MOST_STALE:
            self.too_slow.append(TooSlow(group.index, lost=False))
            self._postpone(group)

    def _lose(self, sample: Sample, reason: str) -> None:
        was_done = sample.state is DONE
        sample.state = LOST
        sample.lost_by = reason
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
                # The lost sample was stale, so the group has another ``age_key`` now.
                lessened = True
                self._unready(group)
            else:
                lessened = False
                self.completed += 1
                group.order = self.completed
            group.state = READY
            oldest = oldest_of(s.oldest for s in group.samples if s.state is DONE)
            group.age_key = tuple(sorted(oldest.items()))
            self.ready[group] = None
            if lessened:
                self.lessened[group] = None
            peers = self.by_age.get(group.age_key)
            if peers is None:
                peers = self.by_age[group.age_key] = OrderedDict()
            peers[group] = None

    def _drop(self, group: Group, again: bool = True) -> None:
        """Drop a group. Its running samples continue, but their results are not used.

        Args:
            again: whether to begin the group again, if it has a retry left and enough of its
                samples may run again.
        """
        left = []
        for sample in group.samples:
            tries = sample.tries if sample.state is WAITING else sample.tries + 1
            if tries <= self.retries and not sample.final:
                left.append(sample.past._replace(tries=tries))
        self._abandon(group, DROPPED)
        if again and group.tries < self.retries and len(left) >= self.min_group:
            self.again.append(_Item(group.index, group.item, group.tries + 1, left, group.late))
        else:
            self.dropped += 1
            self.dropped_stale += any(s.lost_by == STALE for s in group.samples)

    def _postpone(self, group: Group) -> None:
        """Give up a group for now, and begin it again when no other item is left."""
        left = []
        for sample in group.samples:
            # A failed run counts as a try. A run that is given up now does not.
            tries = sample.tries + (sample.state is LOST)
            if tries <= self.retries and not sample.final:
                left.append(sample.past._replace(tries=tries))
        self._abandon(group, POSTPONED)
        self.late.append(_Item(group.index, group.item, group.tries, left, True))

    def _abandon(self, group: Group, state: str) -> None:
        """Remove a group from the live groups. Mark its DONE and WAITING samples as LOST."""
        self._leave(group, state)
        for sample in group.samples:
            if sample.state is DONE:
                self.samples_done -= 1
            if sample.state is WAITING or sample.state is DONE:
                if sample.state is WAITING:
                    self._queue_of(sample).remove(sample)
                sample.state = LOST
                sample.lost_by = GIVEN_UP
                self.lost[GIVEN_UP] += 1

    def _unready(self, group: Group) -> None:
        del self.ready[group]
        self.lessened.pop(group, None)
        peers = self.by_age[group.age_key]
        del peers[group]
        if not peers:
            del self.by_age[group.age_key]

    def _leave(self, group: Group, state: str) -> None:
        if group.state is READY:
            self._unready(group)
        group.state = state
        del self.live[group]

    def validate(self) -> None:
        """Raise ``AssertionError`` if the state is inconsistent. For tests."""
        assert set(self.ready) == {g for g in self.live if g.state is READY}
        by_age = [(age, g) for age, groups in self.by_age.items() for g in groups]
        assert set(by_age) == {(g.age_key, g) for g in self.ready}
        assert all(self.by_age.values())
        assert set(self.lessened) <= set(self.ready)
        for group in self.live:
            assert group.state in (RUNNING, READY)
            open_ = [s for s in group.samples if s.state in (WAITING, RUNNING)]
            assert group.open == len(open_), group.samples
            assert (group.state is READY) == (not open_)
            if group.state is READY:
                assert dict(group.age_key) == oldest_of(s.oldest for s in group.done)
            assert sum(s.state is not LOST for s in group.samples) >= self.min_group
        waiting = [s for g in self.live for s in g.samples if s.state is WAITING]
        assert len(waiting) == len(self.waiting) + len(self.suspects)
        assert set(waiting) == {*self.waiting, *self.suspects}
        assert all(s.losses >= SUSPECT for s in self.suspects)
