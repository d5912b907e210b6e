"""A short run of ``bench.hosts``, with the same code: rollouts survive faults of three hosts."""

from __future__ import annotations

import pytest
from namespaces import need_namespaces

from bench.fault_schedule import HOST_SHARES, schedule
from bench.hosts import measure


@pytest.mark.timeout(900)
async def test_no_call_is_lost_duplicated_or_wrong() -> None:
    need_namespaces()
    found = await measure(
        lambda text: None, faults=12, gap=2.0, in_flight=12, seed=4, delay=0.0, loss=0.0
    )
    assert found["flawless"], (found["reasons"], found["troubles"])
    assert sum(found["faults"].values()) == 12
    assert found["answered"] == found["submitted"] > 100
    assert found["resumed"]


def test_a_schedule_depends_on_its_seed_alone() -> None:
    assert schedule(3, 300, 2.0, HOST_SHARES) == schedule(3, 300, 2.0, HOST_SHARES)
    assert schedule(3, 300, 2.0, HOST_SHARES) != schedule(4, 300, 2.0, HOST_SHARES)
    assert {fault.kind for fault in schedule(3, 300, 2.0, HOST_SHARES)} == set(HOST_SHARES)
