"""The clock of an engine's steps."""

from __future__ import annotations

import pytest

from sglrl_workers.engine.speed import StepClock


def test_the_mean_follows_the_latest_steps() -> None:
    clock = StepClock()
    assert clock.mean == clock.shortest == 0.0
    clock.add(1.0)
    assert clock.mean == 1.0
    for _ in range(40):
        clock.add(0.02)
    assert clock.mean == pytest.approx(0.02, rel=1e-3)


def test_one_short_step_is_not_the_shortest() -> None:
    clock = StepClock()
    for seconds in (0.5, 0.02, 0.03, 0.001, 0.04):
        clock.add(seconds)
    assert clock.shortest == 0.03
    clock.add(0.01)
    clock.add(0.01)
    assert clock.shortest == 0.01


def test_idle_time_belongs_to_no_step() -> None:
    clock = StepClock()
    for now in (10.0, 10.02, 10.05):
        clock.launch(now)
    assert clock.mean == pytest.approx(0.02 + 0.01 / 4)
    assert clock.recent == pytest.approx(0.02)
    clock.idle()
    clock.launch(20.0)
    assert clock.mean == pytest.approx(0.02 + 0.01 / 4)
    assert clock.recent == pytest.approx(0.03)
    clock.launch(20.01)
    assert clock.recent == pytest.approx(0.01)
