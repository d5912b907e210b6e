"""When a worker hangs: by example, and in any order of events against a model that counts anew."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.hangs import PREFILL, PREFILL_TIMES, WEIGHTS, HangDetector, interval_of

TIMEOUT = 10.0
"""The interval is one second then."""


class Clock:
    """A detector of one worker, number 4, and the time."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.now = 100.0
        self.load = 3
        self.detector = HangDetector(timeout, self.now)
        self.detector.watch(4, self.now)
        self.beat(0)

    def beat(self, progress: int, phase: str = "") -> None:
        self.detector.beat(4, progress, phase, self.now)

    def check(self) -> dict[int, str]:
        self.now += self.detector.interval
        return self.detector.check({4: self.load}, self.now)

    def seconds_until_hung(self, progress: int | None, phase: str = "") -> float | None:
        """It beats like this before every check (``None``: not); how long until it is said to
        hang."""
        begun = self.now
        while self.now < begun + 3 * PREFILL_TIMES * TIMEOUT:
            if progress is not None:
                self.beat(progress, phase)
            if self.check():
                return self.now - begun
        return None


def test_a_worker_that_is_not_heard_of() -> None:
    clock = Clock()
    # The first check finds out that it holds calls: that is when its time begins.
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_a_worker_that_makes_no_progress() -> None:
    clock = Clock()
    assert clock.seconds_until_hung(progress=0) == TIMEOUT + 1


def test_why_it_hangs_is_said_once() -> None:
    silent, stuck = Clock(), Clock()
    silent.load = 1
    for _ in range(10):
        assert silent.check() == {}
        stuck.beat(0)
        assert stuck.check() == {}
    stuck.beat(0)
    assert silent.check() == {4: "not heard of for 10 s with 1 call pending"}
    assert stuck.check() == {4: "no progress for 10 s with 3 calls pending"}
    for _ in range(30):
        silent.beat(0)
        assert silent.check() == {}


def test_progress_is_no_hang() -> None:
    clock = Clock()
    for turn in range(100):
        clock.beat(turn // 9)
        assert clock.check() == {}


def test_a_worker_that_holds_no_calls_may_be_silent() -> None:
    clock = Clock()
    clock.load = 0
    assert clock.seconds_until_hung(None) is None
    clock.load = 2
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_the_clock_stops_when_the_last_call_ends() -> None:
    clock = Clock()
    for turn in range(100):
        clock.load = 0 if turn % 9 == 8 else 1
        assert clock.check() == {}


def test_a_prefill_may_take_longer() -> None:
    clock = Clock()
    assert clock.seconds_until_hung(0, PREFILL) == PREFILL_TIMES * TIMEOUT + 1


def test_a_prefill_is_no_excuse_for_silence() -> None:
    clock = Clock()
    clock.beat(0, PREFILL)
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_a_step_after_a_long_prefill_has_its_own_time() -> None:
    clock = Clock()
    for _ in range(50):
        clock.beat(0, PREFILL)
        assert clock.check() == {}
    assert clock.seconds_until_hung(progress=1) == TIMEOUT


def test_a_weight_update_is_not_for_this_watch() -> None:
    clock = Clock()
    assert clock.seconds_until_hung(0, WEIGHTS) is None
    assert clock.seconds_until_hung(progress=0) == TIMEOUT - 1


def test_a_weight_update_is_no_excuse_for_silence() -> None:
    clock = Clock()
    clock.beat(0, WEIGHTS)
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


@pytest.mark.parametrize("beats_first", [True, False])
def test_a_driver_that_was_away_blames_nobody(beats_first: bool) -> None:
    clock = Clock()
    for _ in range(9):
        assert clock.check() == {}
    clock.now += 1000.0
    if beats_first:
        clock.beat(1)
    assert clock.check() == {}
    if not beats_first:
        clock.beat(1)
    # All of the time that it now gets is its own.
    assert clock.seconds_until_hung(None) == TIMEOUT


def test_a_driver_that_is_often_away_still_finds_it() -> None:
    clock = Clock()
    found: dict[int, str] = {}
    for turn in range(1, 30):
        if turn % 3 == 0:
            clock.now += 5.0
        found |= clock.check()
    assert list(found) == [4]


def test_a_replacement_starts_afresh() -> None:
    clock = Clock()
    for _ in range(10):
        assert clock.check() == {}
    clock.detector.watch(4, clock.now)
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_beats_of_nobody_are_ignored() -> None:
    clock = Clock()
    clock.detector.beat(5, 1, "", clock.now)
    assert clock.detector.check({5: 1}, clock.now + 100) == {}


def test_short_timeouts_are_looked_after_more_often() -> None:
    assert interval_of(0.5) == 0.1
    assert interval_of(5.0) == interval_of(3600.0) == 1.0


# --- any order of events --------------------------------------------------------------------------

WORKERS = (0, 1)

worker = st.sampled_from(WORKERS)
events = st.one_of(
    st.tuples(st.just("beat"), worker, st.integers(0, 2), st.sampled_from(["", PREFILL, WEIGHTS])),
    st.tuples(st.just("load"), worker, st.integers(0, 2)),
    st.tuples(st.just("check")),
    st.tuples(st.just("watch"), worker),
)
# Quarters of an interval: all times are exact.
histories = st.lists(st.tuples(st.integers(0, 12), events), max_size=80)


def awake(checks: list[float], since: float, now: float) -> float:
    """Seconds after ``since`` in which the driver was there, by the times of its checks."""
    total = 0.0
    for begin, end in pairwise(checks):
        if end - begin <= 2.0:
            total += max(0.0, min(end, now) - max(begin, since))
    return total


@given(timeout=st.sampled_from([5.0, 8.0]), history=histories)
def test_any_order(timeout: float, history: list[tuple[int, tuple]]) -> None:  # type: ignore[type-arg]
    """The model remembers all that happened and, at every check, judges from the beginning."""
    now = 0.0
    detector = HangDetector(timeout, now)
    assert detector.interval == 1.0
    checks = [now]
    loads = dict.fromkeys(WORKERS, 0)
    # Of each worker: (time, progress, phase), and how long it was seen to hold calls.
    beats: dict[int, list[tuple[float, int, str]]] = {}
    holding_since: dict[int, float | None] = {}
    for quarters, event in history:
        now += quarters / 4
        match event:
            case ("watch", index):
                detector.watch(index, now)
                beats[index] = []
                holding_since[index] = None
            case ("beat", index, progress, phase):
                detector.beat(index, progress, phase, now)
                if index in beats:
                    beats[index].append((now, progress, phase))
            case ("load", index, load):
                loads[index] = load
            case ("check",):
                on_time = now - checks[-1] <= 2.0
                checks.append(now)
                wanted = set()
                for index in list(beats):
                    begun = holding_since[index]
                    if not loads[index]:
                        holding_since[index] = None
                        continue
                    if begun is None:
                        holding_since[index] = now
                        continue
                    heard = [at for at, _, _ in beats[index]]
                    moved = [
                        at
                        for i, (at, progress, phase) in enumerate(beats[index])
                        if phase == WEIGHTS or i == 0 or beats[index][i - 1][1] != progress
                    ]
                    last_phase = beats[index][-1][2] if beats[index] else ""
                    silent = awake(checks, max([begun, *heard]), now)
                    still = awake(checks, max([begun, *moved]), now)
                    allowed = timeout * (10 if last_phase == PREFILL else 1)
                    if on_time and (silent >= timeout or still >= allowed):
                        wanted.add(index)
                assert set(detector.check(loads, now)) == wanted
                for index in wanted:
                    del beats[index], holding_since[index]
