"""The limit of concurrent agents, tested with engines simulated by simple arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.concurrency import INTERVAL, MARGIN, Concurrency
from sglrl.wire.calls import Load


def run(limit: Concurrency, room: int, looks: int, start: float = 0.0) -> list[int]:
    """Simulate an engine that holds ``room`` requests, with all agents generating all the time.

    Above ``room``, requests wait. Far above it, the engine preempts requests.
    """
    seen, preempted = [], 0
    for i in range(looks):
        running = limit.limit
        if running > 1.5 * room:
            preempted += running - room
        load = Load(min(1.0, running / room), max(0, running - room), preempted)
        limit.observe_load(start + i * 1.01 * INTERVAL, running, 0, [load])
        seen.append(limit.limit)
    return seen


@given(st.integers(1, 50_000), st.integers(1, 64))
def test_it_fills_the_engine_and_no_more(room: int, least: int) -> None:
    seen = run(Concurrency(least), room, 60)
    settled = seen[-10:]
    assert min(settled) >= max(least, int(0.85 * room))
    assert max(settled) <= max(least, 2.2 * room + 1)
    assert len(set(settled)) == 1, "and then it rests"


def steps(limit: Concurrency, fixed: float, each: float, looks: int) -> list[int]:
    """Simulate an engine that admits every request. Each request makes its steps longer."""
    seen, now = [], 0.0
    shortest = fixed + each * limit.limit
    for _ in range(looks):
        step = fixed + each * limit.limit
        now += max(INTERVAL, 8 * step)
        limit.observe_load(now, limit.limit, 0, [Load(0.1, 0, 0, step, shortest)])
        seen.append(limit.limit)
    return seen


@given(st.floats(0.005, 0.1), st.floats(1e-6, 1e-3), st.integers(1, 64))
def test_slow_steps_fill_an_engine_without_a_limit(fixed: float, each: float, least: int) -> None:
    def speed(requests: int) -> float:
        return requests / (fixed + each * requests)

    settled = steps(Concurrency(least), fixed, each, 150)[-1]
    assert speed(2 * settled) <= 1.07 * speed(settled), "twice as many would add little"
    shortest = fixed + each * least
    assert fixed + each * settled <= 16 * shortest, "and no agent is slow for nothing"


@given(st.integers(20, 10_000), st.integers(1, 64))
def test_a_late_load_takes_it_back(room: int, least: int) -> None:
    """The agents prepare something before their first turn. Then all of their requests wait."""
    limit = Concurrency(least, most=20 * room)
    idle = run(limit, 100 * room, 60)
    assert idle[-1] == max(least, 20 * room)
    now = 1e3
    for _ in range(60):
        now += INTERVAL
        waiting = max(0, limit.limit - room)
        limit.observe_load(now, limit.limit, 0, [Load(0.5, waiting)])
    assert room <= max(limit.limit, least) <= max(least, room / (1 - 2 * MARGIN) + 2)


def test_the_engines_work_for_new_agents_before_more_start() -> None:
    limit = Concurrency(8)
    assert limit.observe_load(0.0, 8, 0, [Load(0.1, request_steps=40), Load(0.1, request_steps=2)])
    assert limit.limit == 17
    assert not limit.observe_load(
        9.0, 17, 0, [Load(0.1, request_steps=55), Load(0.1, request_steps=3)]
    )
    assert limit.observe_load(9.1, 17, 0, [Load(0.1, request_steps=56), Load(0.1, request_steps=3)])
    # A replacement counts from zero.
    assert limit.observe_load(9.9, limit.limit, 0, [Load(0.1, request_steps=5), Load(0.1)])


def test_agents_above_the_limit_end_before_it_falls_again() -> None:
    limit = Concurrency(10)
    steps(limit, 0.01, 0.0, 5)
    many = limit.limit
    assert limit.observe_load(1e3, many, 0, [Load(0.5, many)])
    assert limit.limit < many
    lower = limit.limit
    assert not limit.observe_load(2e3, many, 0, [Load(0.5, many)])
    assert limit.observe_load(3e3, lower, 0, [Load(0.5, many)])


def test_a_short_step_is_not_compared() -> None:
    """On a busy machine, steps of microseconds vary by any factor."""
    limit = Concurrency(8)
    assert limit.observe_load(0.0, 8, 0, [Load(0.1, 0, 0, 1e-5, 1e-5)])
    assert limit.observe_load(1.0, limit.limit, 0, [Load(0.1, 0, 0, 0.03, 1e-5)])


@given(st.integers(100, 10_000))
def test_preemptions_take_it_back(room: int) -> None:
    limit = Concurrency(4)
    run(limit, room, 60)
    # The requests become ten times as long, so a tenth of them fits.
    seen = run(limit, room // 10, 60, start=1e3)
    assert seen[-1] <= 2 * (room // 10) + 4
    assert seen == sorted(seen, reverse=True)


def test_one_idle_engine_is_enough_reason_to_add() -> None:
    limit = Concurrency(8)
    full, idle = Load(0.99, 5, 0), Load(0.2, 0, 0)
    assert not limit.observe_load(0.0, 8, 0, [full, full])
    assert limit.observe_load(1.0, 8, 0, [full, idle])
    assert not limit.observe_load(9.0, limit.limit, 3, [full, idle]), (
        "calls wait at the driver already"
    )


def test_it_grows_only_if_it_is_what_holds_agents_back() -> None:
    limit = Concurrency(8)
    assert not limit.observe_load(0.0, 7, 0, [Load(0.1, 0, 0)])
    assert not limit.observe_load(0.0, 8, 0, []), "no engine has said anything"
    assert limit.observe_load(0.0, 8, 0, [Load(0.1, 0, 0)])


def test_a_change_must_have_shown_before_the_next_one() -> None:
    limit = Concurrency(8)
    assert limit.observe_load(0.0, 8, 0, [Load(0.1, 0, 0)])
    assert not limit.observe_load(INTERVAL / 2, limit.limit, 0, [Load(0.1, 0, 0)])
    # But preemptions lower the limit at once, and only once.
    assert limit.observe_load(INTERVAL / 2, limit.limit, 0, [Load(1.0, 9, 3)])
    was = limit.limit
    assert not limit.observe_load(INTERVAL * 0.6, was, 0, [Load(1.0, 9, 5)])
    assert limit.limit == was


def test_it_stays_within_its_bounds() -> None:
    limit = Concurrency(4, most=10)
    for i in range(10):
        limit.observe_load(float(i), limit.limit, 0, [Load(0.0, 0, 0)])
    assert limit.limit == 10
    for i in range(10, 40):
        limit.observe_load(float(i), limit.limit, 0, [Load(1.0, 9, i)])
    assert limit.limit == 4


def test_what_was_preempted_before_is_no_news() -> None:
    limit = Concurrency(8)
    assert limit.observe_load(0.0, 8, 0, [Load(0.1, 0, 5)])
    assert limit.limit == 17
    assert limit.observe_load(1.0, 17, 0, [Load(0.1, 0, 6)])
    assert limit.limit == 13
