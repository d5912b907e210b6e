"""More calls than a pool accepts at a time.

They are refused before any object is made for them. When one call of a group is refused, no call of
the group remains.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest

import sglrl

IDS = [1, 2, 3]
POOL: dict[str, Any] = {"engine": "fake", "window": 2, "max_queue": 3, "replicas": 2}


@pytest.fixture(params=["driver", "remote"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[sglrl.Client]:
    """A pool or client that accepts 7 calls at a time, 5 of them at one worker."""
    async with sglrl.launch("fake", **POOL) as pool:
        if request.param == "driver":
            yield pool
        else:
            async with sglrl.connect(pool.address) as remote:
                yield remote


async def test_n_that_no_pool_can_take(client: sglrl.Client) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = r"n=1,000,000,000 makes 1,000,000,000 calls; at most 7 .* 4 by the workers .* 3 that"
    with pytest.raises(sglrl.InvalidRequest, match=error):
        await client.generate(input_ids=IDS, n=10**9)
    with pytest.raises(sglrl.InvalidRequest, match="at most 5 can be taken"):
        await client.generate(input_ids=IDS, n=6, worker=1)
    error = "n=4 for each of 2 prompts makes 8 calls; at most 7"
    with pytest.raises(sglrl.InvalidRequest, match=error):
        await client.generate(input_ids=[IDS, IDS], n=4)
    with pytest.raises(sglrl.InvalidRequest, match="n=1 for each of 8 prompts makes 8 calls"):
        await client.generate(input_ids=[IDS] * 8)
    with pytest.raises(sglrl.InvalidRequest, match="n=1 for each of 8 prompts makes 8 calls"):
        await client.score([IDS] * 8)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 100_000, "kB"
    made = await client.generate(input_ids=IDS, n=7, max_new_tokens=3)
    assert [one.output_ids.tolist() for one in made] == [IDS] * 7
    assert len(await client.score([IDS] * 7)) == 7


async def test_group_sizes_that_no_pool_can_take(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        return 1.0

    items = [{"input_ids": IDS}]
    with pytest.raises(sglrl.UsageError, match="group_size=8 is too large: at most 7"):
        sglrl.rollout(client, agent, items, group_size=8)
    with pytest.raises(sglrl.UsageError, match="group_size=1,000,000,000 is too large"):
        sglrl.rollout(client, agent, items, group_size=10**9, concurrency=2)
    (group,) = [g async for g in sglrl.rollout(client, agent, items, group_size=8, concurrency=2)]
    assert len(group.trajectories) == 8


@pytest.mark.parametrize("remote", [False, True])
async def test_what_was_submitted_before_one_was_refused_is_cancelled(remote: bool) -> None:
    slow: dict[str, Any] = {"engine": "fake", "tokens_per_step": 1, "step_seconds": 0.01}
    async with (
        sglrl.launch("fake", window=2, max_queue=3, **slow) as pool,
        sglrl.connect(pool.address) as other,
    ):
        client = other if remote else pool
        fabric = pool.requests.driver.fabric
        held = [
            asyncio.ensure_future(pool.generate(input_ids=IDS, max_new_tokens=20_000))
            for _ in range(3)
        ]
        while fabric.queue.waiting < 1:
            assert not any(call.done() for call in held)
            await pool.stats()
        before = set(fabric.calls)
        with pytest.raises(sglrl.Overloaded, match="max_queue=3"):
            await client.generate(input_ids=IDS, n=4)
        while set(fabric.calls) - before:
            # A client in another process reports the cancellation a moment later.
            await client.stats()
        assert set(fabric.calls) == before
        assert fabric.queue.waiting == 1
        for call in held:
            call.cancel()
        await asyncio.wait(held)
        assert len(await client.generate(input_ids=IDS, n=3, max_new_tokens=1)) == 3
