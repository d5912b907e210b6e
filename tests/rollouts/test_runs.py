"""Agents over a data set: which groups are returned, and which are not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import sglrl

from .agents import (
    ITEMS,
    one_turn,
    two_turns,
)


@pytest.mark.parametrize("concurrency", [None, 1, 7, 500])
async def test_every_item_gives_one_group(client: sglrl.Client, concurrency: int | None) -> None:
    seen = []
    run = sglrl.rollout(client, two_turns, ITEMS, group_size=3, concurrency=concurrency)
    async for group in run:
        seen.append(group.index)
        assert group.item is ITEMS[group.index]
        assert group.rewards.tolist() == [group.index] * 3
        assert group.failed == 0
        assert group.tokens == 27
        assert [t.metadata for t in group.trajectories] == [
            {"item": group.index, "sample": i} for i in range(3)
        ]
    assert sorted(seen) == list(range(40))
    metrics = run.metrics
    assert (metrics.groups_taken, metrics.samples_done, metrics.turns) == (40, 120, 240)
    assert metrics.generated_tokens == 120 * 9
    assert metrics.samples_running == metrics.groups_running == 0
    if concurrency is not None:
        assert metrics.concurrency == concurrency


async def test_items_of_every_kind(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory | None:
        turn = await session.generate(max_new_tokens=1)
        session.reward(float(turn.output_ids[0]))
        return session.trajectory() if item == 5 else None

    async def items() -> AsyncIterator[int]:
        for i in (4, 5, 6):
            yield i

    run = sglrl.rollout(client, agent, items(), open_session=lambda i: {"input_ids": [i]})
    assert sorted([g.rewards.tolist() async for g in run]) == [[4.0], [5.0], [6.0]]
    with pytest.raises(sglrl.UsageError, match="this item of the data set has no prompt"):
        async for _ in sglrl.rollout(client, agent, [object()], on_error="raise"):
            pass
    with pytest.raises(sglrl.UsageError, match="dataset must be an iterable"):
        sglrl.rollout(client, agent, "a text")
    for wrong in ({"group_size": 0}, {"max_staleness": 1}, {"on_error": "ignore"}, {"timeout": 0}):
        with pytest.raises(sglrl.UsageError):
            sglrl.rollout(client, agent, [], **wrong)
    assert [g async for g in sglrl.rollout(client, agent, [])] == []


async def test_metadata_of_an_item_is_its_own(client: sglrl.Client) -> None:
    made = [{"item": "mine", "sample": "s"}, {"item": "x"}, {}]

    def opened(item: int) -> dict[str, Any]:
        return {"input_ids": [item + 1], "metadata": made[item]}

    found: dict[int, Any] = {}
    async for group in sglrl.rollout(client, one_turn, range(3), open_session=opened):
        found[group.index] = group.trajectories[0].metadata
    assert found == {0: made[0], 1: {"item": "x", "sample": 0}, 2: {"item": 2, "sample": 0}}


async def test_groups_come_as_they_finish_not_as_they_began(client: sglrl.Client) -> None:
    held = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 0:
            await held.wait()
        return await two_turns(session, item)

    async with sglrl.rollout(client, agent, ITEMS, concurrency=4) as run:
        others = await run.take(39)
        assert 0 not in {g.index for g in others}
        held.set()
        assert [g.index for g in await run.take(5)] == [0]
        assert await run.take(5) == []


async def test_nothing_is_lost_when_taking_is_given_up(client: sglrl.Client) -> None:
    held = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] >= 3:
            await held.wait()
        return await two_turns(session, item)

    async with sglrl.rollout(client, agent, ITEMS[:5], concurrency=5) as run:
        with pytest.raises(sglrl.DeadlineExceeded, match="of 5 groups"):
            await run.take(5, timeout=0.2)
        for timeout in (-1, float("nan")):
            with pytest.raises(sglrl.UsageError, match="timeout must be"):
                await run.take(5, timeout=timeout)
            with pytest.raises(sglrl.UsageError, match="timeout must be"):
                await run.pause(timeout=timeout)
        held.set()
        assert sorted(g.index for g in await run.take(5)) == [0, 1, 2, 3, 4]


async def test_a_run_is_looped_over_once(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, two_turns, ITEMS)
    before = asyncio.all_tasks()
    async for _ in run:
        break
    with pytest.raises(sglrl.UsageError, match="has ended"):
        async for _ in run:
            pass
    # After a break, Python closes the generator in another task.
    _, left = await asyncio.wait(asyncio.all_tasks() - before, timeout=300)
    assert not left


async def never(group: sglrl.Group) -> bool:
    return False


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep": never}, "keep must be a plain function"),
        ({"keep": 3}, "keep must be callable"),
        ({"groupsize": 4}, "did you mean 'group_size'"),
        ({"agent": None}, "agent must be callable"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"timeout": "x"}, "timeout must be"),
    ],
)
async def test_arguments_that_no_run_can_have(
    client: sglrl.Client, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.rollout(client, **{"agent": two_turns, "dataset": ITEMS, **wrong})


@pytest.mark.parametrize("seconds", [np.float32(60), np.int64(60), Fraction(60)], ids=type)
async def test_seconds_of_any_number(seconds: Any) -> None:
    async with sglrl.launch("fake", engine="fake", timeout=seconds) as client:
        for session in (
            client.session(input_ids=[1], max_new_tokens=2),
            client.session(input_ids=[1], max_new_tokens=2, timeout=seconds),
        ):
            await session.generate()
        run = sglrl.rollout(client, two_turns, ITEMS[:4], timeout=seconds)
        async with run:
            await run.pause()
            asyncio.get_running_loop().call_later(0.05, run.resume)
            assert len(await run.take(4)) == 4
        away = sglrl.rollout(client, two_turns, ITEMS[:4], timeout=seconds, processes=1)
        assert len([group async for group in away]) == 4


async def test_an_agent_that_is_not_async_ends_the_run(client: sglrl.Client) -> None:
    calls = []

    def agent(session: sglrl.Session, item: Any) -> float:
        calls.append(item)
        return 1.0

    with pytest.raises(sglrl.UsageError, match=r"the agent must be async: it returned 1\.0"):
        async for _ in sglrl.rollout(client, agent, ITEMS):  # type: ignore[arg-type]
            pass
    # The run retried none of the samples that began together.
    assert len(calls) == len({item["id"] for item in calls})


async def test_groups_without_a_signal_are_replaced(client: sglrl.Client) -> None:
    run = sglrl.rollout(
        client, two_turns, ITEMS, batch_size=5, keep=lambda group: group.index % 2 == 0
    )
    async with run:
        batches = [[g.index for g in batch] async for batch in run.batches()]
    assert [len(b) for b in batches] == [5, 5, 5, 5]
    assert sorted(i for batch in batches for i in batch) == list(range(0, 40, 2))
    assert run.metrics.groups_filtered == 20


async def test_an_error_of_keep_is_no_decision(client: sglrl.Client) -> None:
    """``keep`` raises when a smaller group is checked again. The group is checked once more."""
    asked: list[int] = []
    is_ready = asyncio.Event()

    def keep(group: sglrl.Group) -> bool:
        is_ready.set()
        asked.append(len(group.trajectories))
        if asked == [3, 2]:
            raise ValueError("once")
        return len(group.trajectories) == 3

    run = sglrl.rollout(
        client, one_turn, ITEMS[:1], group_size=3, keep=keep, min_group=1, retries=0
    )
    async with run:
        await is_ready.wait()
        (group,) = run._runner.plan.ready
        run._runner.plan._lose(group.samples[0], "stale")
        with pytest.raises(ValueError, match="once"):
            await run.take()
        assert await run.take() == []
    assert asked == [3, 2, 2]


async def test_every_try_has_a_seed_of_its_own(client: sglrl.Client) -> None:
    seeds: dict[int, list[int]] = {0: [], 1: []}

    async def agent(session: sglrl.Session, item: Any) -> float:
        turn = await session.generate(max_new_tokens=2)
        seeds[session.metadata["sample"]].append(turn.params.seed or 0)
        if session.metadata["sample"]:
            raise ValueError("this one never works")
        return 1.0

    # The run raises this error only if the other sample has never finished before.
    with contextlib.suppress(ValueError):
        async for _ in sglrl.rollout(client, agent, ITEMS[:1], seed=3, retries=2, group_size=2):
            raise AssertionError
    assert len(seeds[1]) == 3
    everything = seeds[0] + seeds[1]
    assert len(set(everything)) == len(everything)


async def test_a_run_that_was_stopped_goes_on_where_it_was(client: sglrl.Client) -> None:
    async with sglrl.rollout(client, two_turns, iter(ITEMS), concurrency=5) as run:
        seen = [g.index for g in await run.take(11)]
        state = run.state_dict()
    assert state["next"] >= 11
    assert not set(state["unfinished"]) & set(seen)
    async with sglrl.rollout(client, two_turns, iter(ITEMS), state=state, concurrency=3) as run:
        more = [g.index for g in await run.take(9)]
        state = run.state_dict()
    rest = [g.index async for g in sglrl.rollout(client, two_turns, iter(ITEMS), state=state)]
    assert sorted(seen + more + rest) == list(range(40))
    with pytest.raises(sglrl.UsageError, match="state_dict"):
        sglrl.rollout(client, two_turns, ITEMS, state={"next": 3})


async def test_progress_is_logged_where_there_is_no_terminal(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglrl.rollout")
    async for _ in sglrl.rollout(client, two_turns, ITEMS, progress=True):
        pass
    assert "reward 19.5" in caplog.messages[-1]
    caplog.clear()
    async for _ in sglrl.rollout(client, two_turns, ITEMS, progress=False):
        pass
    assert not caplog.messages


async def test_consumers_are_served_in_order(client: sglrl.Client) -> None:
    """The first of them may be cancelled, and one that is late loses nothing."""
    gate = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await gate.wait()
        return await one_turn(session, item)

    async with sglrl.rollout(client, agent, ITEMS[:14], batch_size=2, concurrency=4) as run:
        batches = run.batches()
        first, second, third, fourth = takes = [
            asyncio.create_task(coroutine)
            for coroutine in (run.take(3), run.take(3), anext(batches), run.take(20))
        ]
        late = asyncio.create_task(run.take(1, timeout=0.05))
        with pytest.raises(sglrl.DeadlineExceeded):
            await late
        first.cancel()
        gate.set()
        done, _ = await asyncio.wait([second])
        assert done == {second}
        sizes = [len(await task) for task in takes[1:]]
        assert sizes == [3, 2, 9]
        assert first.cancelled()
        groups = [*await second, *await third, *await fourth]
        assert sorted(group.index for group in groups) == [*range(14)]
        assert await run.take() == await run.take() == []


@pytest.mark.parametrize("how", ["closed", "failed"])
async def test_all_consumers_that_wait_are_told_of_the_end(client: sglrl.Client, how: str) -> None:
    begun = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        begun.set()
        if how == "failed":
            raise KeyError("lost")
        await asyncio.Event().wait()
        return 1.0

    async with sglrl.rollout(client, agent, ITEMS, on_error="raise") as run:
        takes = [asyncio.create_task(run.take(3)) for _ in range(3)]
        await begun.wait()
        if how == "closed":
            await run.close()
            assert [await task for task in takes] == [[], [], []]
        else:
            for task in takes:
                with pytest.raises(KeyError):
                    await task


async def test_no_more_groups_wait_than_may(client: sglrl.Client) -> None:
    """All samples that run end at the same time."""
    gate = asyncio.Event()
    running = 0

    async def agent(session: sglrl.Session, item: Any) -> float:
        nonlocal running
        running += 1
        await gate.wait()
        return await one_turn(session, item)

    async with sglrl.rollout(client, agent, ITEMS, concurrency=32, ahead=8) as run:
        while running < 8:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gate.set()
        while run.metrics.samples_running:
            await client.generate(input_ids=[1], max_new_tokens=1)
        assert (run.metrics.groups_ready, running) == (8, 8)
        # A consumer may ask for more at a time.
        assert len(await run.take(20)) == 20
        while run.metrics.samples_running:
            await client.generate(input_ids=[1], max_new_tokens=1)
        assert run.metrics.groups_ready <= 20
