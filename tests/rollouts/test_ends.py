"""How runs end, and what is not counted as a failure then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any

import pytest
import torch

import sglrl

from .agents import ITEMS, two_turns


async def test_leaving_early_leaves_nothing(client: sglrl.Client) -> None:
    """The fixtures check that no task remains; this test checks that no call remains."""
    async with sglrl.rollout(client, two_turns, ITEMS, group_size=4) as run:
        await run.take(1)
    async with asyncio.timeout(300):
        # The workers confirm that the calls have stopped.
        while client.requests.driver.fabric.calls:
            await client.requests.driver.idle()
    assert await run.take(1) == []
    with pytest.raises(sglrl.UsageError, match="begun once"):
        await run.__aenter__()


@pytest.mark.parametrize("connected", [False, True])
async def test_a_run_ends_when_its_pool_drains(client: sglrl.Client, connected: bool) -> None:
    """No sample is dropped, and unfinished items can be run elsewhere."""
    at_tools, draining = asyncio.Semaphore(0), asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] > 1:
            at_tools.release()
            await draining.wait()
        await session.generate(max_new_tokens=2)
        return 1.0

    async with contextlib.AsyncExitStack() as stack:
        own = client
        if connected:
            own = await stack.enter_async_context(sglrl.connect(client.address))
        run = sglrl.rollout(own, agent, ITEMS, concurrency=4)
        await stack.enter_async_context(run)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        assert sorted(g.index for g in await run.take(2)) == [0, 1]
        for _ in range(4):
            await at_tools.acquire()
        # The drain waits for this call.
        await client.pause()
        held = tasks.create_task(client.generate(input_ids=[1]))
        await asyncio.sleep(0)
        tasks.create_task(client.close(drain=True))
        await asyncio.sleep(0)
        assert client.pool.driver.fabric.refusing
        draining.set()
        with pytest.raises(sglrl.Closed):
            await run.take(1)
        state = {"next": 6, "unfinished": [2, 3, 4, 5]}
        assert run.state_dict().items() >= state.items()
        assert (run.metrics.groups_dropped, run.metrics.samples_lost) == (0, {})
        held.cancel()


async def test_what_agents_make_of_their_cancellation_is_no_failure(client: sglrl.Client) -> None:
    at_tools = asyncio.Semaphore(0)

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        at_tools.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the tool was interrupted") from None
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, on_error="drop", retries=0, concurrency=3)
    async with run:
        for _ in range(3):
            await at_tools.acquire()
    assert run.state_dict().items() >= {"next": 3, "unfinished": [0, 1, 2]}.items()
    assert run.metrics.samples_lost == {}
    assert not run.errors


@pytest.mark.parametrize("on_error", ["raise", "drop", "retry"])
@pytest.mark.parametrize("why", ["stale", "timeout", "given up"])
async def test_what_comes_of_being_given_up_is_no_failure(
    client: sglrl.Client, why: str, on_error: Any
) -> None:
    """An exception from a tool's clean-up is not counted when the sample was cancelled."""
    begun: list[int] = []
    waits = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        index = session.metadata["sample"]
        begun.append(index)
        await session.generate(max_new_tokens=2)
        if why == "given up" and index == 1:
            await waits.wait()
            raise asyncio.CancelledError
        if why == "stale" and len(begun) > 1:
            return 1.0
        try:
            waits.set()
            await asyncio.Event().wait()
        finally:
            raise ProcessLookupError("the tool has ended already")

    options: dict[str, Any] = {
        "stale": {"batch_size": 1, "max_staleness": 0},
        "timeout": {"timeout": 2.0},
        "given up": {"group_size": 2, "min_group": 2},
    }[why]
    run = sglrl.rollout(client, agent, ITEMS[:1], on_error=on_error, retries=0, **options)
    failed = {"given up": {"error": 1}}.get(why, {})
    async with run:
        taking = asyncio.create_task(run.take())
        await waits.wait()
        if why == "stale":
            await client.update_weights({"w": torch.zeros(1)})
            assert [group.version for group in await taking] == [1], "it was sampled again"
        else:
            with pytest.raises((sglrl.DeadlineExceeded, sglrl.SglrlError)) as error:
                await taking
            assert "ProcessLookupError" not in repr(error.value)
    if (why, on_error) != ("given up", "raise"):
        assert run.metrics.samples_lost == {why: 1, **failed}
    assert not any(isinstance(error, ProcessLookupError) for error in run.errors)
    assert len(begun) == (1 if why == "timeout" else 2)


@pytest.mark.parametrize("how", ["as it is", "in a group", "as another"])
async def test_a_pool_that_is_gone_ends_the_run(how: str) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        if how == "as it is":
            await session.generate(max_new_tokens=40)
        elif how == "in a group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.generate(max_new_tokens=40))
        else:
            try:
                await session.generate(max_new_tokens=40)
            except sglrl.SglrlError as error:
                raise RuntimeError("no turn") from error
        return 1.0

    items = [{"input_ids": [1, 2]}] * 200
    async with sglrl.launch(
        "fake", engine="fake", vocab_size=1000, restarts=0, step_seconds=0.002, tokens_per_step=4
    ) as client:
        run = sglrl.rollout(client, agent, items, concurrency=4)
        taken = 0
        with pytest.raises((sglrl.WorkerLost, ExceptionGroup, RuntimeError)):
            async with run:
                while await run.take():
                    taken += 1
                    if taken == 5:
                        os.kill(client.workers[0].pid, signal.SIGKILL)
        state = run.state_dict()
        assert state["next"] < 50
        assert state["next"] - len(state["unfinished"]) == taken
        assert run.metrics.groups_dropped == 0


async def test_an_ended_run_runs_nothing(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, concurrency=3)
    async with run:
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(timeout=0.05)
        assert (run.metrics.samples_running, run.metrics.groups_running) == (3, 3)
    before = run.metrics
    assert (before.samples_running, before.groups_running) == (0, 0)
    assert "0 samples running" in repr(run)
    await client.generate(input_ids=[1], max_new_tokens=1)
    assert run.metrics.seconds == before.seconds
