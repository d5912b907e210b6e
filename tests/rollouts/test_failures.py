"""Failed samples: which run again, which are lost, and when the run ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

import sglrl

from .agents import (
    ITEMS,
    one_turn,
    two_turns,
    until,
)


class Flaky:
    """An agent that fails the first ``times`` tries of each sample of the given items."""

    def __init__(self, items: set[int], times: int) -> None:
        self.items = items
        self.times = times
        self.tries: dict[tuple[int, int], int] = {}

    async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
        key = (item["id"], session.metadata["sample"])
        self.tries[key] = self.tries.get(key, 0) + 1
        if item["id"] in self.items and self.tries[key] <= self.times:
            await session.generate(max_new_tokens=1)
            raise RuntimeError("the environment broke")
        return await two_turns(session, item)


async def test_failed_samples_are_run_again(client: sglrl.Client) -> None:
    agent = Flaky({3, 17}, times=2)
    run = sglrl.rollout(client, agent, ITEMS, group_size=2, retries=2)
    groups = [g async for g in run]
    assert sorted(g.index for g in groups) == list(range(40))
    assert all(len(g.trajectories) == 2 for g in groups)
    assert run.metrics.samples_retried == 8
    assert run.metrics.samples_lost == {}
    assert len(run.errors) == 8


async def test_what_fails_again_and_again_is_dropped(client: sglrl.Client) -> None:
    agent = Flaky({3}, times=99)
    run = sglrl.rollout(client, agent, ITEMS, group_size=2, retries=1, on_error="retry")
    groups = [g async for g in run]
    assert sorted({*range(40)} - {g.index for g in groups}) == [3]
    metrics = run.metrics
    assert metrics.groups_dropped == 1
    # One sample fails for good, and its group is dropped with the other sample. The group is not
    # begun again, because the failed sample has no try left.
    assert metrics.samples_lost == {"error": 1, "given up": 1}
    assert metrics.samples_done == 78


@pytest.mark.parametrize("how", ["error", "late", "filtered"])
@pytest.mark.parametrize("count", [12, 13])
async def test_the_last_group_to_end_is_lost(client: sglrl.Client, how: str, count: int) -> None:
    """A consumer that waits for a whole batch then gets the rest."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        reward = await two_turns(session, item)
        if item["id"] == 5:
            # Two batches were taken, the other groups are ready, and the consumer waits for more.
            await until(lambda: run.metrics.samples_done >= 2 * (count - 1))
            await until(lambda: run.metrics.groups_taken >= 8)
            if count % 4 != 1:
                await until(lambda: run._runner.plan.wanted)
            if how == "error":
                raise RuntimeError("the environment broke")
            if how == "late":
                await asyncio.sleep(300)
        return reward

    run = sglrl.rollout(
        client,
        agent,
        ITEMS[:count],
        group_size=2,
        batch_size=4,
        retries=0,
        timeout=3,
        keep=lambda group: how != "filtered" or group.item["id"] != 5,
    )
    async with asyncio.timeout(60), run:
        batches = [[group.index for group in batch] async for batch in run.batches()]
    assert sorted(index for batch in batches for index in batch) == [
        index for index in range(count) if index != 5
    ]
    assert [len(batch) for batch in batches] == [4, 4, count - 9]


async def test_a_smaller_group_may_be_enough(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if session.metadata["sample"] == 1:
            raise RuntimeError("the environment broke")
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, group_size=3, min_group=2, on_error="drop")
    groups = [g async for g in run]
    assert [(len(g.trajectories), g.failed) for g in groups] == [(2, 1)] * 40
    assert run.metrics.samples_lost == {"error": 40}
    assert run.metrics.samples_retried == 0


async def test_an_error_may_end_the_run(client: sglrl.Client) -> None:
    agent = Flaky({5}, times=1)
    with pytest.raises(RuntimeError, match="the environment broke"):
        async for _ in sglrl.rollout(client, agent, ITEMS, on_error="raise", concurrency=3):
            pass


async def test_an_agent_that_never_works_is_not_run_over_all_data(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> Any:
        await session.generate(max_new_tokens=1)
        return "a text"

    endless = (ITEMS[i % 40] for i in range(10**9))
    with pytest.raises(sglrl.UsageError, match="must return its reward") as caught:
        async for _ in sglrl.rollout(client, agent, endless):
            pass
    assert "none of the first 32 samples" in "".join(caught.value.__notes__)


async def test_a_short_data_set_of_which_nothing_works(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        raise RuntimeError("the environment broke")

    with pytest.raises(RuntimeError, match="the environment broke") as caught:
        async for _ in sglrl.rollout(client, agent, ITEMS[:3], retries=0):
            pass
    assert "none of the 3 samples" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("how", ["a task it awaits", "its own task"])
async def test_an_agent_that_is_cancelled_from_within_has_failed(
    client: sglrl.Client, how: str
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        reward = await two_turns(session, item)
        if item["id"] == 3 and not run.metrics.samples_retried:
            if how == "its own task":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(0)
            lookup = asyncio.create_task(asyncio.Event().wait())
            lookup.cancel()
            await lookup
        return reward

    run = sglrl.rollout(client, agent, ITEMS, concurrency=4)
    assert len([g async for g in run]) == len(ITEMS)
    assert run.metrics.samples_retried == 1
    assert "cancelled by something that it awaited" in str(run.errors[0])


async def test_an_agent_that_would_leave_the_program_has_failed(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 3:
            raise SystemExit(2)
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, on_error="drop")
    assert len([g async for g in run]) == len(ITEMS) - 1
    assert "leave the program, with 2" in str(run.errors[0])


async def test_what_is_given_up_before_its_first_step_is_counted(client: sglrl.Client) -> None:
    """A sample fails, and drops a group whose other sample was started in the same tick."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if session.metadata["sample"] == 0 and item["id"] < 10:
            raise RuntimeError("at once")
        return await two_turns(session, item)

    run = sglrl.rollout(
        client, agent, ITEMS, group_size=2, concurrency=2, retries=0, on_error="drop"
    )
    assert len([g async for g in run]) == 30
    assert run.metrics.samples_lost == {"error": 10, "given up": 10}
    assert run.metrics.samples_running == 0


async def test_failures_behind_a_success_do_not_end_the_run(client: sglrl.Client) -> None:
    """The same holds if the successful sample's group was dropped because of another sample."""
    done = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        if item["id"] == 0 and session.metadata["sample"] == 0:
            await session.generate(max_new_tokens=2)
            done.set()
            return 1.0
        await done.wait()
        if item["id"] < 35:
            raise RuntimeError("the environment broke")
        return await one_turn(session, item)

    run = sglrl.rollout(
        client, agent, ITEMS, group_size=2, concurrency=2, retries=0, on_error="drop"
    )
    assert sorted([group.index async for group in run]) == [35, 36, 37, 38, 39]


async def test_what_fails_is_run_again_while_the_next_item_is_awaited(
    client: sglrl.Client,
) -> None:
    """The next item arrives only after the last result."""
    come = asyncio.Event()

    async def items() -> AsyncIterator[dict[str, Any]]:
        for item in ITEMS[:3]:
            yield item
            await come.wait()
            come.clear()

    agent = Flaky({0, 1, 2}, times=2)
    async with sglrl.rollout(client, agent, items(), group_size=2) as run:
        for index in range(3):
            (group,) = await run.take(1, timeout=300)
            assert group.index == index
            come.set()
        assert await run.take(1, timeout=300) == []
    assert run.metrics.samples_retried == 12


async def test_a_lost_worker_costs_no_sample(client: sglrl.Client) -> None:
    async with sglrl.rollout(client, two_turns, ITEMS * 20, group_size=2) as run:
        await run.take(10)
        os.kill(client.workers[0].pid, signal.SIGKILL)
        groups = await run.take(790)
    assert len(groups) == 790
    assert all(len(g.trajectories) == 2 for g in groups)
    assert run.metrics.samples_lost == {}


class Bomb(sglrl.Actor):
    """A tool whose process exits at number 13."""

    @sglrl.endpoint
    async def use(self, number: int) -> int:
        if number == 13:
            os._exit(1)
        return number + 1


async def test_a_tool_that_crashes_harms_its_own_trajectory_only(client: sglrl.Client) -> None:
    async with sglrl.spawn(Bomb, replicas=3, window=1, restarts=100) as tool:

        async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=4)
            session.observe([await tool.use(item["id"])])
            await session.generate(max_new_tokens=2)
            return float(session.ids[-3])

        run = sglrl.rollout(client, agent, ITEMS, group_size=2, on_error="drop", retries=0)
        groups = {g.index: g async for g in run}
    assert sorted({*range(40)} - set(groups)) == [13]
    assert all(g.rewards.tolist() == [g.index + 1] * 2 for g in groups.values())
    assert {type(error) for error in run.errors} <= {sglrl.WorkerLost}
