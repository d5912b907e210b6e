"""The rate of an engine's tokens is recent."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from sglrl.wire.engine import RATE_SECONDS, EngineStats
from sglrl_workers.engine import fake
from sglrl_workers.engine.speed import TokenRate


def test_a_young_engine() -> None:
    rate = TokenRate(100.0)
    assert rate.per_second(100.0) == 0.0
    rate.add(30, 101.0)
    rate.add(10, 102.0)
    assert rate.per_second(102.0) == 20.0
    assert rate.per_second(104.0) == 10.0


def test_an_engine_that_was_stopped() -> None:
    """It has the greatest total, and another engine is faster now."""
    stopped, other = TokenRate(0.0), TokenRate(0.0)
    for second in range(100):
        stopped.add(500, float(second))
        other.add(100, float(second))
    for second in range(100, 130):
        other.add(100, float(second))
    assert stopped.per_second(99.0) > other.per_second(99.0)
    assert stopped.per_second(129.0) == 0.0
    assert other.per_second(129.0) == pytest.approx(100, rel=0.1)
    # It recovers, and the time in which it was stopped counts.
    stopped.add(500, 130.0)
    assert stopped.per_second(130.0) == 500 / RATE_SECONDS


@pytest.mark.parametrize("seed", range(5))
def test_any_times(seed: int) -> None:
    """The tokens that count are those of the window, up to one of its twenty parts."""
    chance = random.Random(seed)
    times = sorted(chance.uniform(0, 60) for _ in range(300))
    tokens = [chance.randint(0, 50) for _ in times]
    rate = TokenRate(0.0)
    assert all(before <= after for before, after in pairwise(times))
    for at, (now, new) in enumerate(zip(times, tokens, strict=True)):
        rate.add(new, now)
        seconds = min(RATE_SECONDS, now)
        for window, compare in ((RATE_SECONDS, "__le__"), (RATE_SECONDS * 0.95, "__ge__")):
            expected = sum(
                n for t, n in zip(times[: at + 1], tokens, strict=False) if t > now - window
            )
            found = rate.per_second(now) * seconds
            assert getattr(round(found, 6), compare)(expected + 1e-6 * (compare == "__le__")), seed


def test_the_engine_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(fake, "time", SimpleNamespace(monotonic=lambda: now))
    spec: Any = SimpleNamespace(model="x", args={})
    engine = fake.FakeEngine(spec)
    now += 5
    engine.rate.add(100, now)
    stats: EngineStats = engine.stats()
    assert (stats.uptime, stats.tokens_per_second) == (5.0, 20.0)
    now += 2 * RATE_SECONDS
    assert engine.stats().tokens_per_second == 0.0
