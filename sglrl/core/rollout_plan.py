"""Which samples run, which groups are handed out, and which are not.

The samples of one item of the data set are a group. One group's life::

    item ──begin──▶ RUNNING ──every sample done or lost──▶ READY ──take──▶ TAKEN
      ▲                │                                     │  ╲
      │                │ too few samples are left            │   ▶ FILTERED
      └──once more─────┴──▶ DROPPED ◀───── too old ──────────┘

One sample's: WAITING ──▶ RUNNING ──▶ DONE or LOST; a failed one may go back to WAITING.

A sample of an item is run at most ``1 + retries`` times in all its groups: a group that is begun
again has the samples of the one before, less those that have no run left. (A run whose process was
lost is not counted, at most ``MOST_LOSSES`` times.)

Staleness is bounded as in AReaL (https://arxiv.org/abs/2505.24298, eq. 3): with policy version v,
batches of B groups and a bound of η versions, at most ``(v + η + 1) B`` groups have been begun and
not given up. That alone bounds it only if groups finish in order; so samples whose oldest token is
more than η versions old are lost too, running or done, when new weights come.

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
"""Why a sample was lost: its oldest token is too old."""
MOST_LOSSES: Final = 3
"""Of one sample."""
SUSPECT: Final = 2
"""After so many it is run where no other such sample is: then it is clear whose fault the next one
is."""
GIVEN_UP: Final = "given up"
"""Its group was given up. Other reasons are the caller's words."""


class Sample:
    """One rollout of an item.

    ``tries``: how often it was run before, in all groups of the item. ``losses``: how often what
    ran it was lost. ``final``: it has failed in a way that no other run would change. ``oldest``:
    the policy version of its oldest token, when it is DONE.
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
    """The samples of an item. ``index``: its number in the data set. ``tries``: how often it was
    begun before. ``before``: index, tries and losses of each sample. ``oldest``: the policy version
    of the oldest token, while it is READY."""

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
        """Samples that are neither DONE nor LOST."""

    @property
    def done(self) -> list[Sample]:
        return [s for s in self.samples if s.state is DONE]


class Plan:
    """The state of one run.

    Args:
        group_size: samples of each item.
        min_group: a group with fewer samples left is given up.
        retries: how often a sample is run again, in all. A group that was given up is begun again
            at most so often, while enough of its samples may be run again.
        batch_size, max_staleness: B and η above; None: no bound.
        ahead: groups that may be READY before no further one is begun.
        version: the policy's, now.
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
        """Those that are READY by the version of their oldest token, in order of completion. (Taken
        from the front: the first of a dict is found behind all that stood before it.)"""
        self.lessened: dict[Group, None] = {}
        """Those that are READY with fewer samples than they once were."""
        self.waiting: deque[Sample] = deque()
        self.suspects: deque[Sample] = deque()
        """Those that wait and have been lost ``SUSPECT`` times."""
        self.again: deque[tuple[int, Any, int, list[tuple[int, int, int]]]] = deque()
        """Items of groups that were given up: number, item, how often it was begun, and index,
        tries and losses of each sample that may be run again."""
        self.running = 0
        self.next_index = 0
        self.exhausted = False
        """The data set has no further item."""
        self.taken = self.filtered = self.dropped = 0
        self.samples_done = self.retried = 0
        self.lost: Counter[str] = Counter()
        """Samples, by reason."""

    # --- groups -----------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Nothing is left to run or to take."""
        return self.exhausted and not self.live and not self.again

    def may_begin(self) -> bool:
        """Whether one more group may be begun now."""
        if len(self.ready) >= self.ahead:
            return False
        if self.max_staleness is None:
            return True
        assert self.batch_size is not None
        passed = self.version - self.first_version
        allowed = (passed + self.max_staleness + 1) * self.batch_size
        return self.taken + len(self.live) < allowed

    def begin(self, index: int, item: Any) -> Group:
        """An item of the data set, by its number."""
        self.next_index = max(self.next_index, index + 1)
        return self._begin(index, item, 0, [(i, 0, 0) for i in range(self.group_size)])

    def begin_again(self) -> Group | None:
        """An item whose group was given up, if there is one."""
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
        """There are new weights. What is done and too old by now is lost."""
        self.version = version
        if self.max_staleness is None:
            return
        for group in list(self.live):
            for sample in group.done:
                # Unless its group was given up with the one before.
                if sample.state is DONE and self._too_old(sample.oldest):
                    self.samples_done -= 1
                    self._lose(sample, STALE)

    def take(self) -> Group | None:
        """The READY group with the oldest tokens; among equals the one that was ready first."""
        if not self.ready:
            return None
        group = next(iter(self.by_age[min(self.by_age)]))
        self._leave(group, TAKEN)
        self.taken += 1
        return group

    def next_lessened(self) -> Group | None:
        """One that is READY with fewer samples than before, until it is filtered or kept."""
        return next(iter(self.lessened), None)

    def keep(self, group: Group) -> None:
        """It is wanted with the samples that it has left."""
        del self.lessened[group]

    def filter(self, group: Group) -> None:
        """A READY group is not wanted; another may take its place."""
        self._leave(group, FILTERED)
        self.filtered += 1

    def unfinished(self) -> list[int]:
        """Items that were begun and neither taken, filtered nor dropped for good, by number."""
        return sorted({g.index for g in self.live} | {index for index, _, _, _ in self.again})

    # --- samples ----------------------------------------------------------------------------------

    def start(self, *, suspect: bool = False) -> Sample | None:
        """The next sample to run; ``suspect``: it may be one."""
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
        """A running sample has ended well. Its group, if that is READY now."""
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
        """A running sample has failed, or is given up. Its group, if that is READY now.

        Args:
            retry: run it again in its group.
            final: do not run it again if the group is begun again, either.
        """
        assert sample.state is RUNNING, sample
        self.running -= 1
        sample.final = final
        if retry and sample.tries < self.retries and sample.group.state is RUNNING:
            sample.tries += 1
            sample.state = WAITING
            self.retried += 1
            # At once: the others of the group wait for it.
            self._queue_of(sample).appendleft(sample)
            return None
        self._lose(sample, reason)
        return sample.group if sample.group.state is READY else None

    def interrupted(self, sample: Sample) -> bool:
        """What a running sample ran in is gone, which may not be its fault: it is run again, and
        that is no try. False: it has happened too often, or its group was given up; then its item
        is ``condemned``."""
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
        """A running sample has ended what it ran in too often. Its group is given up, and not begun
        again: the others of it would do the same."""
        assert sample.state is RUNNING, sample
        group = sample.group
        self.running -= 1
        if group.state is RUNNING:
            self._drop(group, again=False)
        self._lose(sample, reason)

    def _queue_of(self, sample: Sample) -> deque[Sample]:
        return self.suspects if sample.losses >= SUSPECT else self.waiting

    def is_stale(self, sample: Sample, oldest: int | None) -> bool:
        """Whether a running sample whose oldest token so far is of this version can still be of
        use; and if its group was given up, it cannot."""
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
        """READY when nothing is open; given up when too few can still be done."""
        left = sum(s.state is not LOST for s in group.samples)
        if left < self.min_group:
            self._drop(group)
        elif not group.open:
            if group.state is READY:
                # It has lost its oldest.
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
        """What runs of it goes on, and is of no use. It is begun again, if it was not too often and
        enough of its samples may be run again."""
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
        """For tests: raises ``AssertionError`` if something does not add up."""
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
