"""An engine with little KV cache says so, and a run gives it no more agents than it can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
    await session.generate(max_new_tokens=20 + item["id"] * 7 % 60, ignore_eos=True)
    return 1.0


async def test_agents_are_as_many_as_the_kv_cache_holds(qwen: Path) -> None:
    items = [{"id": i, "input_ids": [3 + i, 5, 7]} for i in range(60)]
    # Room for seven whole ones, and for some more at the beginning of their answers. By default
    # SGLang would keep nearly all the room that a request may come to need.
    async with sglrl.launch(
        qwen,
        device="cpu",
        max_total_tokens=400,
        max_running_requests=128,
        schedule_conservativeness=0.1,
    ) as client:
        waiting = []
        # Whenever the engine says so, and not when this process gets its turn.
        client._running().on_loads.add(lambda: waiting.append(client._loads()[0][0].waiting))
        async with sglrl.rollout(client, agent, items[:30], concurrency=30) as run:
            await run.take(30)
        assert max(waiting) > 0
        (load,), _ = client._loads()
        assert load.preempted > 0, "it took requests out of its cache, and computed them twice"
        assert run.metrics.samples_lost == {}
        limits = []
        async with sglrl.rollout(client, agent, items[30:]) as run:
            while await run.take(3):
                limits.append(run.metrics.concurrency)
    assert run.metrics.samples_done == 30
    assert max(limits) <= 24
