"""A few seeded faults under load with real engines, injected by ``bench.faults``.

Every answer equals the answer without faults, token for token.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fault_cases import CASES
from bench.fault_schedule import DROP, KILL, SLOW, UPDATE
from bench.faults import measure

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_no_call_is_lost_duplicated_or_wrong_during_updates(qwen: Path) -> None:
    case = CASES["sglang-cpu"]._replace(
        replicas=2,
        faults=6,
        gap=0.7,
        in_flight=4,
        shares={KILL: 1, UPDATE: 2, DROP: 1, SLOW: 1},
    )
    found = await measure(lambda text: None, case=case, model=str(qwen), seed=8)
    assert found["flawless"], (found["reasons"], found["troubles"])
    assert sum(found["faults"].values()) == 6
    assert set(found["faults"]) == set(case.shares)
    assert found["updates"] + sum(found["updates_refused"].values()) == found["faults"][UPDATE]
    assert found["updates"]
    assert found["resumed"]
