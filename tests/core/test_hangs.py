"""When a worker hangs: by example, and in any order of events against a simple model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglrl.core.hangs import PAUSED, PREFILL, PREFILL_TIMES, WEIGHTS, HangDetector, interval_of

TIMEOUT = 10.0
"""With this timeout the interval is one second."""


class Clock:
    """A detector that watches one worker, number 4, and the time."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.now = 100.0
        self.load = 3
        self.detector = HangDetector(timeout, self.now)
        self.detector.watch(4, self.now)
        self.heartbeat(0)

    def heartbeat(self, progress: int, phase: str = "") -> None:
        self.detector.heartbeat(4, progress, phase, self.now)

    def check(self) -> dict[int, str]:
        self.now += self.detector.interval
        return self.detector.check({4: self.load}, self.now)

    def seconds_until_hung(self, progress: int | None, phase: str = "") -> float | None:
        """Return the seconds until the worker is reported to hang, or None.

        A heartbeat with this progress and phase arrives before every check. With progress None, no
        heartbeat arrives.
        """
        begun = self.now
        while self.now < begun + 3 * PREFILL_TIMES * TIMEOUT:
            if progress is not None:
                self.heartbeat(progress, phase)
            if self.check():
                return self.now - begun
        return None


def test_a_worker_that_is_not_heard_of() -> None:
    clock = Clock()
    # The first check finds that the worker holds calls. Its time begins there.
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_a_worker_that_makes_no_progress() -> None:
    clock = Clock()
    assert clock.seconds_until_hung(progress=0) == TIMEOUT + 1


def test_a_paused_worker_does_not_hang_but_may_be_silent() -> None:
    clock = Clock()
    assert clock.seconds_until_hung(progress=0, phase=PAUSED) is None
    assert clock.seconds_until_hung(None) is not None


def test_why_it_hangs_is_said_once() -> None:
    silent, stuck = Clock(), Clock()
    silent.load = 1
    for _ in range(10):
        assert silent.check() == {}
        stuck.heartbeat(0)
        assert stuck.check() == {}
    stuck.heartbeat(0)
    assert silent.check() == {4: "no heartbeat for 10 s with 1 call pending"}
    assert stuck.check() == {4: "no progress for 10 s with 3 calls pending"}
    for _ in range(30):
        silent.heartbeat(0)
        assert silent.check() == {}


def test_progress_is_no_hang() -> None:
    clock = Clock()
    for turn in range(100):
        clock.heartbeat(turn // 9)
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
    clock.heartbeat(0, PREFILL)
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_a_step_after_a_long_prefill_has_its_own_time() -> None:
    clock = Clock()
    for _ in range(50):
        clock.heartbeat(0, PREFILL)
        assert clock.check() == {}
    assert clock.seconds_until_hung(progress=1) == TIMEOUT


def test_a_weight_update_is_not_for_this_watch() -> None:
    clock = Clock()
    assert clock.seconds_until_hung(0, WEIGHTS) is None
    assert clock.seconds_until_hung(progress=0) == TIMEOUT - 1


def test_a_weight_update_is_no_excuse_for_silence() -> None:
    clock = Clock()
    clock.heartbeat(0, WEIGHTS)
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def silent(clock: Clock) -> None:
    """Send no heartbeat. The first heartbeat reported a prefill."""


def stuck(clock: Clock) -> None:
    clock.heartbeat(1)


@pytest.mark.parametrize("behaves", [silent, stuck])
@pytest.mark.parametrize("beats_first", [True, False])
def test_a_driver_that_was_away_blames_nobody(
    behaves: Callable[[Clock], None], beats_first: bool
) -> None:
    clock = Clock()
    for _ in range(9):
        assert clock.check() == {}
    clock.now += 1000.0
    if beats_first:
        clock.heartbeat(1, PREFILL)
    assert clock.check() == {}
    if not beats_first:
        clock.heartbeat(1, PREFILL)
    # The worker must get the full timeout again.
    turns = 0
    found: dict[int, str] = {}
    while not found:
        turns += 1
        behaves(clock)
        found = clock.check()
    assert turns == TIMEOUT


@pytest.mark.parametrize("behaves", [silent, stuck])
@pytest.mark.parametrize(("away", "turns"), [(0.0, 11), (1.0, 9), (5.0, 16)])
def test_a_driver_that_is_often_away_still_finds_it(
    behaves: Callable[[Clock], None], away: float, turns: int
) -> None:
    """Time counts only while the driver runs. Two intervals between checks are not too late."""
    clock = Clock()
    clock.heartbeat(1, PREFILL)
    found: dict[int, str] = {}
    for turn in range(1, turns + 1):
        assert not found
        if turn % 3 == 0:
            clock.now += away
        behaves(clock)
        found = clock.check()
    assert list(found) == [4]


def test_a_replacement_starts_afresh() -> None:
    clock = Clock()
    for _ in range(10):
        assert clock.check() == {}
    clock.detector.watch(4, clock.now)
    assert clock.seconds_until_hung(None) == TIMEOUT + 1


def test_beats_of_nobody_are_ignored() -> None:
    clock = Clock()
    clock.detector.heartbeat(5, 1, "", clock.now)
    assert clock.detector.check({5: 1}, clock.now + 100) == {}


def test_short_timeouts_are_looked_after_more_often() -> None:
    assert interval_of(0.5) == 0.1
    assert interval_of(5.0) == interval_of(3600.0) == 1.0


# --- any order of events --------------------------------------------------------------------------

WORKERS = (0, 1)

worker = st.sampled_from(WORKERS)
phases = st.sampled_from(["", "", PREFILL, WEIGHTS])
# Quarters of an interval keep all times exact.
pauses = st.sampled_from([0, 0, 1, 2, 3, 5, 8, 9, 20])
events = st.one_of(
    st.tuples(st.just("heartbeat"), worker, st.integers(0, 1), phases),
    st.tuples(st.just("load"), worker, st.sampled_from([0, 1, 1, 2])),
    st.tuples(st.just("checks"), st.integers(1, 6)),
    st.tuples(st.just("checks"), st.integers(1, 6)),
    st.tuples(st.just("pause"), pauses),
    st.tuples(st.just("watch"), worker),
)


class Model:
    """Stores all events of one worker, and judges them from the beginning at every check."""

    def __init__(self) -> None:
        self.heartbeats: list[tuple[float, int, str]] = []
        self.holding_since: float | None = None

    def hangs(self, timeout: float, load: int, checks: list[float]) -> bool:
        """Return whether the worker hangs.

        Args:
            checks: the times of all checks so far. The last one is now.
        """
        now = checks[-1]
        since = self.holding_since
        if not load:
            self.holding_since = None
            return False
        if since is None:
            self.holding_since = now
            return False
        before = [-1, *(progress for _, progress, _ in self.heartbeats)]
        heard = [at for at, _, _ in self.heartbeats]
        moved = [
            at
            for (at, progress, phase), previous in zip(self.heartbeats, before, strict=False)
            if phase == WEIGHTS or progress != previous
        ]
        prefills = bool(self.heartbeats) and self.heartbeats[-1][2] == PREFILL
        silent = awake(checks, max([since, *heard]))
        still = awake(checks, max([since, *moved]))
        on_time = now - checks[-2] <= 2.0
        return on_time and (silent >= timeout or still >= timeout * (10 if prefills else 1))


def awake(checks: list[float], since: float) -> float:
    """Return the seconds after ``since`` in which the driver ran, by the times of its checks."""
    return sum(
        max(0.0, end - max(begin, since)) for begin, end in pairwise(checks) if end - begin <= 2.0
    )


@settings(max_examples=500)
@given(timeout=st.sampled_from([5.0, 6.5]), history=st.lists(events, max_size=60))
def test_any_order(timeout: float, history: list[Any]) -> None:
    now = 0.0
    detector = HangDetector(timeout, now)
    assert detector.interval == 1.0
    checks = [now]
    loads = dict.fromkeys(WORKERS, 1)
    models: dict[int, Model] = {}
    for number in WORKERS:
        detector.watch(number, now)
        models[number] = Model()
    for event in history:
        match event:
            case ("watch", number):
                detector.watch(number, now)
                models[number] = Model()
            case ("heartbeat", number, progress, phase):
                detector.heartbeat(number, progress, phase, now)
                if number in models:
                    models[number].heartbeats.append((now, progress, phase))
            case ("load", number, load):
                loads[number] = load
            case ("pause", quarters):
                now += quarters / 4
            case ("checks", count):
                for _ in range(count):
                    now += 1.0
                    checks.append(now)
                    wanted = {n for n, m in models.items() if m.hangs(timeout, loads[n], checks)}
                    assert set(detector.check(loads, now)) == wanted
                    for number in wanted:
                        del models[number]
