"""Calls that wait: the reason is reported once, and is in the error at the deadline."""

from __future__ import annotations

from typing import Any

import pytest

from sglrl.core.calls import Call
from sglrl.core.effects import End, Waiting
from sglrl.core.fabric import Fabric
from sglrl.core.holds import PATIENCE
from sglrl.errors import DeadlineExceeded

from .pool import finish, make_call, make_fabric


def submit(fabric: Fabric, now: float, **settings: Any) -> Call:
    call = make_call(**settings)
    fabric.submit(call, now)
    return call


def reports(fabric: Fabric, now: float) -> list[str]:
    fabric.outbox.clear()
    fabric.tick(now)
    return [effect.reason for effect in fabric.outbox if isinstance(effect, Waiting)]


def error_of(fabric: Fabric) -> str:
    (end,) = [effect for effect in fabric.outbox if isinstance(effect, End)]
    assert isinstance(end.outcome, DeadlineExceeded)
    return str(end.outcome)


def test_a_call_that_waits_is_reported_once() -> None:
    fabric = make_fabric(1)
    fabric.holds.set("sleep", "the engines sleep", 10.0)
    assert fabric.next_deadline() == 10.0 + PATIENCE
    # No call waits yet.
    assert reports(fabric, 10.0 + PATIENCE) == []
    assert fabric.next_deadline() is None
    submit(fabric, now=20.0)
    assert fabric.next_deadline() == 20.0 + PATIENCE
    assert reports(fabric, 20.0) == []
    assert reports(fabric, 20.0 + PATIENCE) == ["the engines sleep"]
    submit(fabric, now=30.0)
    assert fabric.next_deadline() is None
    # Another reason is reported, too.
    fabric.holds.set("weights", "no weights", 40.0)
    assert reports(fabric, 40.0 + PATIENCE) == ["no weights"]
    fabric.holds.set("weights", "no weights", 50.0)
    assert fabric.next_deadline() is None


def test_a_call_has_its_own_patience() -> None:
    fabric = make_fabric(1)
    fabric.holds.set("pause", "paused", 0.0)
    submit(fabric, now=PATIENCE - 1)
    assert reports(fabric, PATIENCE) == []
    assert fabric.next_deadline() == 2 * PATIENCE - 1
    assert reports(fabric, 2 * PATIENCE - 1) == ["paused"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_reason_that_has_ended(workers: int) -> None:
    fabric = make_fabric(workers)
    fabric.holds.set("pause", "paused", 0.0)
    first = submit(fabric, now=0.0)
    fabric.holds.set("pause", None, 1.0)
    assert reports(fabric, PATIENCE) == []
    finish(fabric, first)
    submit(fabric, now=PATIENCE)
    assert fabric.next_deadline() is None


def test_the_error_at_the_deadline_has_the_reasons() -> None:
    fabric = make_fabric(1)
    for part, reason in (("sleep", "the engines sleep"), ("pause", "paused")):
        fabric.holds.set(part, reason, 0.0)
    submit(fabric, now=0.0, deadline=2.0)
    assert fabric.next_deadline() == 2.0
    fabric.outbox.clear()
    fabric.tick(2.0)
    assert error_of(fabric).endswith("last at a worker): the engines sleep; paused")
    fabric.outbox.clear()
    # A call that changes the state of an engine does not wait for it.
    submit(fabric, now=3.0, deadline=4.0, urgent=True, pinned=0)
    fabric.outbox.clear()
    fabric.tick(4.0)
    assert error_of(fabric).endswith("last at a worker)")
