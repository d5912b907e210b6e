"""Failures of a run: when there are too many, and which of them are logged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.failures import MAX_MESSAGES, MIN_ATTEMPTS, Failures


@given(
    outcomes=st.lists(st.booleans(), max_size=400),
    rate=st.none() | st.floats(0.01, 1.0),
    concurrency=st.integers(1, 30),
)
def test_the_rate_is_that_of_the_latest_attempts(
    outcomes: list[bool], rate: float | None, concurrency: int
) -> None:
    failures = Failures(rate)
    size = max(64, 4 * concurrency)
    for i, failed in enumerate(outcomes, 1):
        latest = outcomes[max(0, i - size) : i]
        share = sum(latest) / size
        found = failures.attempt(failed, concurrency)
        if rate is None or len(latest) < size or share <= rate:
            assert found is None
        else:
            assert found == share


def test_the_window_follows_the_concurrency() -> None:
    failures = Failures(0.5)
    for _ in range(400):
        assert failures.attempt(False, 100) is None
    for _ in range(32):
        assert failures.attempt(True, 100) is None
    assert failures.attempt(True, 1) == 33 / MIN_ATTEMPTS
    assert failures.attempt(True, 100) is None, "the window is not full"


def test_an_error_is_logged_at_powers_of_ten() -> None:
    failures = Failures(None)
    due = [i for i in range(1, 20_697) if failures.count("KeyError", "a.py:3", "'x'").is_due()]
    assert due == [1, 10, 100, 1000, 10_000]
    kind = failures.most_frequent()
    assert kind is not None
    assert (kind.count, repr(kind)) == (20_696, "KeyError: 'x'")
    assert not kind.is_due()


def test_messages_that_differ_every_time_are_one_kind_in_the_end() -> None:
    failures = Failures(None)
    lines = sum(
        failures.count("ValueError", "a.py:3", f"bad answer {i}").is_due() for i in range(2400)
    )
    # The first messages are logged, then number 1, 10, 100 and 1000 of all others.
    assert lines == MAX_MESSAGES + 4
    assert sum(kind.count for kind in failures.kinds.values()) == 2400
    assert failures.count("ValueError", "b.py:1", "bad answer 7").count == 1, "of another place"
    assert failures.count("ValueError", "a.py:3", "bad answer 7").count == 2
