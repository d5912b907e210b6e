"""The limit of concurrent agents, tested with engines simulated by simple arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.concurrency import INTERVAL, Concurrency, Load


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
        limit.look(start + i * 1.01 * INTERVAL, running, 0, [load])
        seen.append(limit.limit)
    return seen


@given(st.integers(1, 50_000), st.integers(1, 64))
def test_it_fills_the_engine_and_no_more(room: int, least: int) -> None:
    seen = run(Concurrency(least), room, 60)
    settled = seen[-10:]
    assert min(settled) >= max(least, int(0.85 * room))
    assert max(settled) <= max(least, 2.2 * room + 1)
    assert len(set(settled)) == 1, "and then it rests"


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
    assert not limit.look(0.0, 8, 0, [full, full])
    assert limit.look(1.0, 8, 0, [full, idle])
    assert not limit.look(9.0, limit.limit, 3, [full, idle]), "calls wait at the driver already"


def test_it_grows_only_if_it_is_what_holds_agents_back() -> None:
    limit = Concurrency(8)
    assert not limit.look(0.0, 7, 0, [Load(0.1, 0, 0)])
    assert not limit.look(0.0, 8, 0, []), "no engine has said anything"
    assert limit.look(0.0, 8, 0, [Load(0.1, 0, 0)])


def test_a_change_must_have_shown_before_the_next_one() -> None:
    limit = Concurrency(8)
    assert limit.look(0.0, 8, 0, [Load(0.1, 0, 0)])
    assert not limit.look(INTERVAL / 2, limit.limit, 0, [Load(0.1, 0, 0)])
    # But preemptions lower the limit at once, and only once.
    assert limit.look(INTERVAL / 2, limit.limit, 0, [Load(1.0, 9, 3)])
    was = limit.limit
    assert not limit.look(INTERVAL * 0.6, was, 0, [Load(1.0, 9, 5)])
    assert limit.limit == was


def test_it_stays_within_its_bounds() -> None:
    limit = Concurrency(4, most=10)
    for i in range(10):
        limit.look(float(i), limit.limit, 0, [Load(0.0, 0, 0)])
    assert limit.limit == 10
    for i in range(10, 40):
        limit.look(float(i), limit.limit, 0, [Load(1.0, 9, i)])
    assert limit.limit == 4


def test_what_was_preempted_before_is_no_news() -> None:
    limit = Concurrency(8)
    assert limit.look(0.0, 8, 0, [Load(0.1, 0, 5)])
    assert limit.limit == 17
    assert limit.look(1.0, 17, 0, [Load(0.1, 0, 6)])
    assert limit.limit == 13
