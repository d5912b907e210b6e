"""How runs and their sessions end, and pause: time-outs, cancellation, resumption."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.rl import has_signal

from .test_rollouts import ITEMS, new_weights, of_now


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", engine="fake", vocab_size=1000, context_length=256) as client:
        yield client


async def one_turn(session: sglrl.Session, item: Any) -> float:
    await session.generate(max_new_tokens=2)
    return 1.0


async def test_what_is_observed_while_the_prompt_is_encoded_comes_behind(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.session(input_ids=[1, 2], max_new_tokens=2)
    begun, encoded = asyncio.Event(), asyncio.Event()

    async def slow_ids() -> bytes:
        begun.set()
        await encoded.wait()
        return np.array([1, 2], "<i4").tobytes()

    monkeypatch.setattr(session._spec, "ids", slow_ids)
    session.observe([3])
    turn = asyncio.ensure_future(session.generate())
    await begun.wait()
    session.observe([4])
    session.unobserve()
    session.observe([5])
    encoded.set()
    assert (await turn).prompt_ids.tolist() == [1, 2, 3]
    assert (await session.generate()).prompt_ids.tolist() == [1, 2, 3, 1, 2, 5]


# --- time-outs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_timeout_of_an_agent_is_not_the_takers(
    client: sglrl.Client, timeout: float | None
) -> None:
    async def slow(session: sglrl.Session, item: Any) -> float:
        raise TimeoutError("the tool is slow")

    async with sglrl.rollout(client, slow, ITEMS, on_error="raise") as run:
        with pytest.raises(TimeoutError, match="the tool is slow"):
            await run.take(1, timeout=timeout)
    async with sglrl.rollout(client, slow, ITEMS[:3], retries=0) as run:
        with pytest.raises(TimeoutError, match="the tool is slow"):
            await run.take(1, timeout=timeout)


@pytest.mark.parametrize("items", [4, 1000])
async def test_samples_that_are_all_too_late_are_an_error(client: sglrl.Client, items: int) -> None:
    async def late(session: sglrl.Session, item: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    data = ({"input_ids": [1 + i % 900]} for i in range(items))
    async with sglrl.rollout(client, late, data, timeout=0.05, retries=0, concurrency=8) as run:
        with pytest.raises(sglrl.DeadlineExceeded, match=r"longer than 0\.05 s"):
            await run.take(1)


async def test_a_turn_that_is_given_up_at_the_gate_leaves_the_timeout(
    client: sglrl.Client,
) -> None:
    begun, paused = asyncio.Event(), asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        begun.set()
        await paused.wait()
        try:
            async with asyncio.timeout(0.05):
                await session.generate(max_new_tokens=2)
        except TimeoutError:
            gone.set()
        await asyncio.Event().wait()
        return 1.0

    gone = asyncio.Event()
    async with sglrl.rollout(client, agent, ITEMS[:1], timeout=1.0, retries=0) as run:
        await begun.wait()
        await run.pause()
        paused.set()
        await gone.wait()
        run.resume()
        with pytest.raises(sglrl.DeadlineExceeded, match=r"longer than 1 s"):
            await run.take(1)
        assert run.metrics.samples_lost == {"timeout": 1}


# --- pauses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 30.0])
async def test_a_session_that_is_closed_at_the_gate(
    client: sglrl.Client, timeout: float | None
) -> None:
    turns: list[asyncio.Task[Any]] = []
    begun, paused, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        begun.set()
        await paused.wait()
        turns.append(asyncio.create_task(session.generate(max_new_tokens=2)))
        await asyncio.sleep(0)
        asked.set()
        return 1.0

    async with sglrl.rollout(client, agent, ITEMS[:1], timeout=timeout) as run:
        await begun.wait()
        await run.pause()
        paused.set()
        await asked.wait()
        with pytest.raises(sglrl.Closed):
            await turns[0]


async def test_closing_a_paused_run_ends_agents_that_go_on(client: sglrl.Client) -> None:
    begun, refused = asyncio.Event(), asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        with pytest.raises(sglrl.Closed):
            await session.generate(max_new_tokens=2)
        refused.set()
        return 1.0

    async with sglrl.rollout(client, agent, ITEMS[:1]) as run:
        await begun.wait()
        await run.pause()
    assert refused.is_set()


async def test_a_pause_that_is_ended_before_it_has_begun() -> None:
    async with sglrl.launch(
        "fake", engine="fake", vocab_size=1000, tokens_per_step=1, step_seconds=0.02
    ) as client:
        begun = asyncio.Event()

        async def agent(session: sglrl.Session, item: Any) -> float:
            begun.set()
            await session.generate(max_new_tokens=400)
            return 1.0

        async with sglrl.rollout(client, agent, ITEMS[:1]) as run:
            await begun.wait()
            await asyncio.sleep(0)
            pause = asyncio.create_task(run.pause())
            await asyncio.sleep(0)
            run.resume()
            with pytest.raises(sglrl.UsageError, match="resumed before"):
                await pause


# --- ends caused from outside ---------------------------------------------------------------------


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
        assert client._pool.driver.fabric.refusing
        draining.set()
        with pytest.raises(sglrl.Closed):
            await run.take(1)
        assert run.state_dict() == {"next": 6, "unfinished": [2, 3, 4, 5]}
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
    assert run.state_dict() == {"next": 3, "unfinished": [0, 1, 2]}
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
        "timeout": {"timeout": 0.2},
        "given up": {"group_size": 2, "min_group": 2},
    }[why]
    run = sglrl.rollout(client, agent, ITEMS[:1], on_error=on_error, retries=0, **options)
    failed = {"given up": {"error": 1}}.get(why, {})
    async with run:
        taking = asyncio.create_task(run.take())
        await waits.wait()
        if why == "stale":
            new_weights(client)
        if why == "stale":
            assert await taking == []
        else:
            with pytest.raises((sglrl.DeadlineExceeded, sglrl.SglrlError)) as error:
                await taking
            assert "ProcessLookupError" not in repr(error.value)
    if (why, on_error) != ("given up", "raise"):
        assert run.metrics.samples_lost == {why: 1, **failed}
    assert not any(isinstance(error, ProcessLookupError) for error in run.errors)
    assert len(begun) == (2 if why == "given up" else 1)


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


async def test_a_first_turn_that_failed_has_no_version() -> None:
    """The sample is therefore not stale when new weights arrive."""

    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory:
        with pytest.raises(sglrl.DeadlineExceeded):
            await session.generate(max_new_tokens=200)
        assert session.oldest_version is None
        new_weights(client)
        session._spec.timeout = None
        return await of_now(session, item)

    item = {"id": 1, "input_ids": [1, 2, 3]}
    async with sglrl.launch("fake", engine="fake", step_seconds=0.01, tokens_per_step=1) as client:
        run = sglrl.rollout(
            client,
            agent,
            [item],
            open_session=lambda item: {"input_ids": item["input_ids"], "timeout": 0.1},
            batch_size=1,
            max_staleness=0,
            retries=0,
        )
        async with run:
            (group,) = await run.take()
    assert (run.metrics.samples_lost, group.failed) == ({}, 0)


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
    await asyncio.sleep(0.01)
    assert run.metrics.seconds == before.seconds


async def test_metadata_of_an_item_is_its_own(client: sglrl.Client) -> None:
    made = [{"item": "mine", "sample": "s"}, {"item": "x"}, {}]

    def opened(item: int) -> dict[str, Any]:
        return {"input_ids": [item + 1], "metadata": made[item]}

    found: dict[int, Any] = {}
    async for group in sglrl.rollout(client, one_turn, range(3), open_session=opened):
        found[group.index] = group.trajectories[0].metadata
    assert found == {0: made[0], 1: {"item": "x", "sample": 0}, 2: {"item": 2, "sample": 0}}


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
        (group,) = run._plan.ready
        run._plan._lose(group.samples[0], "stale")
        with pytest.raises(ValueError, match="once"):
            await run.take()
        assert await run.take() == []
    assert asked == [3, 2, 2]


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


# --- progress of a run: items, groups and seeds ---------------------------------------------------


async def test_an_item_that_was_read_and_not_begun_is_not_done(client: sglrl.Client) -> None:
    state = {"next": 10, "unfinished": [3, 5, 7]}
    arguments: dict[str, Any] = {"state": state, "batch_size": 1, "max_staleness": 0}
    async with sglrl.rollout(client, one_turn, ITEMS[:12], **arguments) as run:
        (first,) = await run.take(1)
        # No more groups may begin, and the run has already read the next item.
        while run._items.read_ahead is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        found = run.state_dict()
    assert first.index == 3
    assert found == {"next": 10, "unfinished": [5, 7]}
    rest = [g.index async for g in sglrl.rollout(client, one_turn, ITEMS[:12], state=found)]
    assert sorted(rest) == [5, 7, 10, 11]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_data_set_that_is_cancelled_from_within(client: sglrl.Client, waits: bool) -> None:
    async def data() -> AsyncIterator[Any]:
        for item in ITEMS[:2]:
            yield item
        if waits:
            await asyncio.sleep(0.01)
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner
        yield ITEMS[2]

    taken = []
    with pytest.raises(sglrl.SglrlError, match="data set was cancelled"):
        async for group in sglrl.rollout(client, one_turn, data()):
            taken.append(group.index)
    assert sorted(taken) == [0, 1]


async def test_a_group_that_has_lost_samples_is_looked_at_again(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory:
        await session.generate(max_new_tokens=2)
        number = session.metadata["sample"]
        # Only the sample of the oldest policy has a reward.
        made = session.trajectory(float(number == 0))
        return made.replace(versions=np.where(made.loss_mask, int(number > 0), -1))

    async with sglrl.rollout(
        client, agent, ITEMS[:1], group_size=4, batch_size=1, max_staleness=1, keep=has_signal
    ) as run:
        while not run.metrics.groups_ready:  # noqa: ASYNC110
            await asyncio.sleep(0)
        new_weights(client)
        new_weights(client)
        assert await run.take(1) == []
        assert run.metrics.groups_filtered == 1
        assert run.metrics.samples_lost == {"stale": 1}


async def test_every_try_has_a_seed_of_its_own(client: sglrl.Client) -> None:
    seeds: dict[int, list[int]] = {0: [], 1: []}

    async def agent(session: sglrl.Session, item: Any) -> float:
        assert session._state.seed is not None
        seeds[session.metadata["sample"]].append(session._state.seed)
        if session.metadata["sample"]:
            raise ValueError("this one never works")
        await session.generate(max_new_tokens=2)
        return 1.0

    # The run raises this error only if the other sample has never finished before.
    with contextlib.suppress(ValueError):
        async for _ in sglrl.rollout(client, agent, ITEMS[:1], seed=3, retries=2, group_size=2):
            raise AssertionError
    assert len(seeds[1]) == 3
    everything = seeds[0] + seeds[1]
    assert len(set(everything)) == len(everything)


# --- names ----------------------------------------------------------------------------------------


async def test_one_name_of_a_value_overrides_another(client: sglrl.Client) -> None:
    async with client.session(input_ids=[1, 2], max_tokens=50) as session:
        turn = await session.generate(max_new_tokens=3)
        assert len(turn.output_ids) == 3
        turn = await session.generate(max_completion_tokens=4)
        assert len(turn.output_ids) == 4
        with pytest.raises(sglrl.InvalidRequest, match="another name"):
            await session.generate(max_tokens=1, max_new_tokens=1)

    async def agent(session: sglrl.Session, item: Any) -> float:
        turn = await session.generate(max_new_tokens=3, sampling_seed=5)
        assert len(turn.output_ids) == 3
        return 1.0

    def opening(item: Any) -> dict[str, Any]:
        return {"input_ids": item["input_ids"], "max_completion_tokens": 9}

    run = sglrl.rollout(
        client, agent, ITEMS[:2], max_tokens=50, seed=1, open_session=opening, on_error="raise"
    )
    assert len([group async for group in run]) == 2
