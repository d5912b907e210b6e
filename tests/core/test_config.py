"""Timeouts of calls and of heartbeats."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from sglrl.actors.actor import deadline_from
from sglrl.config import check_heartbeat, check_timeout
from sglrl.errors import UsageError


@pytest.mark.parametrize("timeout", [None, 0, 0.0, 3, 1e-9, math.inf, np.float32(2), Fraction(1)])
def test_time_outs(timeout: Any) -> None:
    check_timeout(timeout)


@pytest.mark.parametrize("timeout", [-1, -1e-9, math.nan, -math.inf, True, "3", [3], 1j])
def test_what_is_no_time_out(timeout: Any) -> None:
    with pytest.raises(UsageError, match="time_to_join must be a number of seconds"):
        check_timeout(timeout, "time_to_join")


@pytest.mark.parametrize("timeout", [10**400, 1e10], ids=["10**400", "1e10"])
def test_a_time_out_that_no_clock_can_tell(timeout: float) -> None:
    with pytest.raises(UsageError, match="time_to_join is longer than"):
        check_timeout(timeout, "time_to_join")


def test_an_infinite_time_out_is_no_limit() -> None:
    assert deadline_from(math.inf) is None


def test_a_deadline_is_as_precise_as_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglrl.actors.actor.now", lambda: 1e7 + 0.25)
    assert deadline_from(np.float32(0.5)) == 1e7 + 0.75  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [None, 1, 0.001, 1e6, np.float32(2)])
def test_heartbeats(timeout: Any) -> None:
    found = check_heartbeat(timeout)
    assert found == timeout
    assert found is None or type(found) is float


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, 1e7, True, "3"])
def test_what_is_no_heartbeat(timeout: Any) -> None:
    with pytest.raises(UsageError, match=f"heartbeat_timeout must be .*got {timeout!r}"):
        check_heartbeat(timeout)
