"""When a lost worker is replaced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.supervision import FIRST_DELAY, MAX_DELAY, Supervision


def test_a_worker_that_served_is_replaced_at_once() -> None:
    supervision = Supervision(3, 60.0)
    assert [supervision.lost("killed", t, served=True) for t in (0.0, 1.0, 2.0)] == [0.0] * 3
    assert supervision.lost("killed", 3.0, served=True) is None


def test_the_budget_is_of_a_period() -> None:
    supervision = Supervision(1, 10.0)
    assert supervision.lost("killed", 0.0, served=True) == 0.0
    assert supervision.lost("killed", 10.0, served=True) == 0.0, "the first was a period ago"
    assert supervision.lost("killed", 19.9, served=True) is None


def test_failed_starts_are_retried_at_growing_intervals() -> None:
    supervision = Supervision(100, 1e9)
    delays = [supervision.lost("out of memory", float(t), served=False) for t in range(12)]
    assert delays[:5] == [0.0, FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY, 8 * FIRST_DELAY]
    assert delays[-1] == MAX_DELAY
    assert supervision.lost("killed", 99.0, served=True) == 0.0
    assert supervision.lost("killed", 99.5, served=False) == 0.0, "once is no pattern"


def test_failures_in_a_row_exhaust_the_budget_however_rare() -> None:
    supervision = Supervision(3, 10.0)
    delays = [supervision.lost("no memory", 100.0 * t, served=False) for t in range(4)]
    assert None not in delays[:3]
    assert delays[3] is None
    assert supervision.used_up == "the last 4 ended before they had served a call"


def test_what_used_the_budget_up_is_said() -> None:
    supervision = Supervision(2, 60.0)
    for t, said in ((0.0, ""), (1.0, ""), (2.5, "no more than 2 restarts in 60 s")):
        supervision.lost("killed", t, served=True)
        assert supervision.used_up == said


def test_no_restarts() -> None:
    assert Supervision(0, 60.0).lost("killed", 0.0, served=True) is None


def test_history() -> None:
    supervision = Supervision(9, 60.0)
    supervision.lost("killed by SIGKILL", 0.0, served=True)
    assert supervision.history == "lost 1 time: killed by SIGKILL"
    supervision.lost("killed by SIGKILL", 0.0, served=True)
    supervision.lost("exited with status 1", 0.0, served=True)
    assert supervision.history == (
        "lost 3 times: killed by SIGKILL (2 times); exited with status 1"
    )
    supervision.lost("exited with status 1", 0.0, served=True, detail="ValueError: no")
    supervision.lost("killed by SIGKILL", 0.0, served=True)
    assert supervision.history == (
        "lost 5 times: killed by SIGKILL (3 times); exited with status 1 (2 times); the last "
        "error: ValueError: no"
    )


@given(
    restarts=st.integers(0, 4),
    period=st.integers(1, 9),
    losses=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40),
)
def test_against_a_model(restarts: int, period: int, losses: list[tuple[int, bool]]) -> None:
    """Each period has exactly the allowed restarts. Delays double while no worker serves."""
    supervision = Supervision(restarts, period)
    now, granted, failures = 0, [], 0
    for after, served in losses:
        now += after
        delay = supervision.lost("killed", now, served=served)
        failures = 0 if served else failures + 1
        if sum(t > now - period for t in granted) >= restarts or failures > restarts:
            assert delay is None
            continue
        granted.append(now)
        wanted = 0.0 if failures < 2 else min(MAX_DELAY, FIRST_DELAY * 2 ** (failures - 2))
        assert delay == wanted
