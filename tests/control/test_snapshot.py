"""``Client.snapshot`` beside what the program knows, and the operations that end single workers."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import stat
from typing import Any

import httpx
import pytest
import torch

import sglrl
from sglrl.remote.running_pools import running_pools


async def agent(session: Any, item: Any) -> float:
    await session.generate(max_new_tokens=4)
    return float(item["reward"])


async def test_rollouts_weights_and_sessions_are_in_a_snapshot() -> None:
    async with sglrl.launch("tiny", engine="fake", replicas=2) as client:
        empty = await client.snapshot()
        assert (empty.rollouts, empty.gateways, empty.updates, empty.hosts) == ([], [], [], [])
        assert empty.pid == os.getpid()
        assert empty.weight_version == 0
        assert [one.info for one in empty.workers] == client.workers
        items = [{"prompt": f"{i}", "reward": i % 2} for i in range(6)]
        run = sglrl.rollout(client, agent, items, group_size=2, batch_size=3, max_staleness=4)
        gateway = sglrl.serve(client)
        async with run, gateway, httpx.AsyncClient() as http:
            await run.take(6)
            report = await client.update_weights({"w": torch.zeros(2, 3)})
            async with gateway.session() as session:
                answer = await http.post(
                    f"{session.base_url}/chat/completions",
                    json={"model": "x", "messages": [{"role": "user", "content": "a"}], "n": 3},
                    timeout=60,
                )
                assert answer.status_code == 200, answer.text
                async with sglrl.connect(client.address) as other:
                    snapshot = await other.snapshot()
            await client.pause()
            paused = await client.snapshot()
            await client.resume()
        ended = await client.snapshot()
    (rollout,) = snapshot.rollouts
    assert known(rollout.metrics.flat()) == known(run.metrics.flat())
    assert rollout.staleness == {0: 6}
    assert (rollout.items, rollout.group_size) == (6, 2)
    assert (rollout.batch_size, rollout.max_staleness) == (3, 4)
    assert snapshot.updates == [report]
    assert snapshot.weight_version == 1
    (served,) = snapshot.gateways
    assert served.url == gateway.url
    (of_session,) = served.sessions
    assert (of_session.turns, of_session.running) == (3, 0)
    totals = [one.engine.generated_tokens for one in snapshot.workers if one.engine is not None]
    assert len(totals) == 2
    assert sum(totals) >= 6 * 2 * 4
    assert "client.resume()" in paused.held
    assert (ended.rollouts, ended.gateways, ended.held) == ([], [], "")


def known(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that have a value and do not depend on the time."""
    return {k: v for k, v in metrics.items() if "second" not in k and not math.isnan(v)}


async def test_a_worker_that_does_not_answer_is_shown_without_statistics() -> None:
    async with sglrl.launch("tiny", engine="fake", replicas=2) as client:
        pid = client.workers[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            snapshot = await client.snapshot()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [one.engine is None for one in snapshot.workers] == [False, True]


async def test_kill_moves_calls_and_starts_a_replacement() -> None:
    async with sglrl.launch(
        "tiny", engine="fake", replicas=2, tokens_per_step=1, step_seconds=0.02
    ) as client:
        calls = [
            asyncio.ensure_future(client.generate(input_ids=[i + 1], max_new_tokens=100))
            for i in range(8)
        ]
        # When a stream on each worker has its first tokens, the other calls run too.
        for worker in range(2):
            async for _ in client.stream(input_ids=[9], max_new_tokens=2, worker=worker):
                pass
        held = client.workers[0].load
        await client.kill_worker(0)
        for completion in await asyncio.gather(*calls):
            assert len(completion.output_ids) == 100
        await client.wait_until_full()
        first, second = (await client.snapshot()).workers
        assert held > 1
        assert (first.history.restarts, first.history.moved_calls) == (1, held)
        assert (second.history.restarts, second.history.moved_calls) == (0, 0)


async def test_restart_waits_for_the_calls_of_the_worker() -> None:
    async with sglrl.launch("tiny", engine="fake", tokens_per_step=1) as client:
        before = client.workers[0].pid
        call = asyncio.ensure_future(client.generate(input_ids=[5], max_new_tokens=64))
        await asyncio.sleep(0)
        await client.restart_worker(0)
        completion = await call
        assert len(completion.output_ids) == 64
        await client.wait_until_full()
        assert client.workers[0].pid != before
        (worker,) = (await client.snapshot()).workers
        assert (worker.history.restarts, worker.history.moved_calls) == (1, 0)
        assert worker.history.seconds < 60


async def test_stacks_name_the_functions_of_a_worker() -> None:
    async with sglrl.launch("tiny", engine="fake") as client:
        assert "most recent call first" in await client.worker_stacks(0)
        os.kill(client.workers[0].pid, signal.SIGSTOP)
        assert await client.worker_stacks(0) == ""
        await client.kill_worker(0)
        await client.wait_until_full()


async def test_workers_that_do_not_exist_are_named() -> None:
    async with sglrl.launch("tiny", engine="fake", replicas=2) as client:
        for method in (client.restart_worker, client.kill_worker, client.worker_stacks):
            with pytest.raises(sglrl.UsageError, match="there is no worker 7"):
                await method(7)
        await client.remove_worker(1)
        with pytest.raises(sglrl.UsageError, match="already retired: worker 1"):
            await client.restart_worker(1)
        with pytest.raises(sglrl.UsageError, match="worker 1 is retired already"):
            await client.kill_worker(1)


async def test_a_running_pool_is_found_until_it_is_closed() -> None:
    def mine() -> list[str]:
        return [pool.entry.address for pool in running_pools() if pool.pid == os.getpid()]

    async with sglrl.launch("tiny", engine="fake") as client:
        assert client.address in mine()
        folder = client.address.partition("://")[2].rpartition("/")[0]
        assert stat.S_IMODE(os.stat(f"{folder}/pool.json").st_mode) == 0o600
    assert client.address not in mine()
