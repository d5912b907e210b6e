"""An engine with little KV cache reports its load, and a rollout starts only agents that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.core.driver_listener import DriverListener

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Loads(DriverListener):
    """Appends the number of waiting requests whenever the engine reports its load."""

    def __init__(self, client: sglrl.Client, waiting: list[int]) -> None:
        self.client = client
        self.waiting = waiting

    def on_loads(self) -> None:
        self.waiting.append(self.client.pool.loads()[0][0].waiting)


async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
    await session.generate(max_new_tokens=20 + item["id"] * 7 % 60, ignore_eos=True)
    return 1.0


async def test_agents_are_as_many_as_the_kv_cache_holds(qwen: Path) -> None:
    items = [{"id": i, "input_ids": [3 + i, 5, 7]} for i in range(60)]
    # The cache has room for seven complete requests and for some more that have just started. By
    # default SGLang would reserve nearly all the room that a request may need.
    async with sglrl.launch(
        qwen,
        device="cpu",
        max_total_tokens=400,
        max_running_requests=128,
        schedule_conservativeness=0.1,
    ) as client:
        waiting: list[int] = []
        # Record every report of the engine; polling would depend on when this process runs.
        client.requests.driver.add_listener(Loads(client, waiting))
        async with sglrl.rollout(client, agent, items[:30], concurrency=30) as run:
            await run.take(30)
        assert max(waiting) > 0
        (load,), _ = client.pool.loads()
        assert load.preempted > 0, "it took requests out of its cache, and computed them twice"
        assert run.metrics.samples_lost == {}
        limits = []
        async with sglrl.rollout(client, agent, items[30:]) as run:
            while await run.take(3):
                limits.append(run.metrics.concurrency)
    assert run.metrics.samples_done == 30
    assert max(limits) <= 24
