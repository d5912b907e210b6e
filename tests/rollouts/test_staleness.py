"""Runs beside a trainer: how far they run ahead, and which tokens are too old."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

import sglrl
from sglrl.core.rollout_group import MOST_STALE
from sglrl.rl import has_signal
from sglrl.rollouts import delivery, lost_weights

from .agents import (
    ITEMS,
    new_weights,
    of_now,
    two_turns,
)


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_rollouts_run_ahead_by_so_many_versions(client: sglrl.Client, staleness: int) -> None:
    begun: list[int] = []

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        begun.append(item["id"])
        return await of_now(session, item)

    async with sglrl.rollout(
        client, agent, ITEMS, batch_size=4, max_staleness=staleness, concurrency=40
    ) as run:
        for step in range(4):
            batch = await run.take(4)
            assert len(batch) == 4
            # While the trainer works, the run begins no more samples than this.
            while run.metrics.groups_ready < 4 * staleness or run.metrics.samples_running:
                await client.generate(input_ids=[1], max_new_tokens=1)
            assert len(begun) == (step + staleness + 1) * 4
            new_weights(client)


async def test_tokens_that_are_too_old_are_not_handed_out(client: sglrl.Client) -> None:
    sampled, held = asyncio.Event(), asyncio.Event()
    tries: dict[int, int] = {}

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        tries[item["id"]] = tries.get(item["id"], 0) + 1
        made = await of_now(session, item)
        if item["id"] == 0 and tries[0] == 1:
            sampled.set()
            await held.wait()
        return made

    async with sglrl.rollout(
        client, agent, ITEMS, batch_size=2, max_staleness=0, concurrency=8
    ) as run:
        await sampled.wait()
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(2, timeout=0.1)
        # Group 1 is ready, and group 0 holds tokens of version 0. Neither is usable after the
        # update.
        new_weights(client)
        batch = await run.take(2)
        assert not held.is_set(), "the straggler was cancelled, not awaited"
        assert run.metrics.samples_lost == {"stale": 2}
        assert all(g.staleness == 0 for g in batch)
        assert len(batch) == 2
        # Their items are run again.
        rest = await run.take(2)
        assert {0, 1} <= {g.index for g in (*batch, *rest)}
        assert (tries[0], tries[1]) == (2, 2)


async def test_a_sample_that_is_always_too_old_is_lost_in_the_end(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Its group is judged without it. The trainer makes new weights without any group."""

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
        assert run.metrics.samples_lost["stale"] == 2 * MOST_STALE
        assert run.metrics.samples_retried == run.metrics.groups_dropped == 0
    assert caplog.text.count("item 0 is too slow") == 2
    assert "the item is sampled again when no other item is left" in caplog.text
    assert "the sample is lost" in caplog.text


async def test_a_run_ends_though_an_item_is_always_too_slow(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer makes new weights without waiting for groups."""
    held = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        held.set()
        await asyncio.Event().wait()
        return 1.0

    async with sglrl.rollout(client, agent, ITEMS[3:4], batch_size=1, max_staleness=1) as run:
        taking = asyncio.create_task(run.take())
        for _ in range(2 * MOST_STALE):
            await held.wait()
            held.clear()
            new_weights(client)
            new_weights(client)
        assert await taking == []
        state = run.state_dict()
    metrics = run.metrics
    assert (metrics.groups_dropped, metrics.groups_stale, metrics.groups_postponed) == (1, 1, 0)
    assert metrics.samples_lost == {"stale": 2 * MOST_STALE, "given up": 1}
    assert "1 groups were dropped because of stale samples" in caplog.text
    assert "failed samples" not in caplog.text
    assert "item 0 is too slow" in caplog.text
    assert state["unfinished"] == []


async def test_a_first_turn_that_failed_has_no_version() -> None:
    """The sample is therefore not stale when new weights arrive."""

    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory:
        with pytest.raises(sglrl.DeadlineExceeded):
            await session.generate(max_new_tokens=200)
        assert session.oldest_version is None
        new_weights(client)
        session.spec.options = session.spec.options.changed(timeout=None)
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


async def test_who_waits_for_new_weights_is_told(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "_HINT_SECONDS", 0.05)

    run = sglrl.rollout(client, of_now, ITEMS, batch_size=2, max_staleness=0)
    async with run:
        await run.take(2)
        assert "waits for new weights" not in caplog.text
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(2, timeout=2.0)
        assert caplog.text.count("waits for new weights") == 1
        new_weights(client)
        assert len(await run.take(2)) == 2


async def test_a_consumer_that_waits_while_no_worker_has_the_weights(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_weights, "_CHECK_SECONDS", 0.05)
    await client.pause()
    async with sglrl.rollout(client, two_turns, ITEMS[:1], concurrency=1) as run:
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(timeout=0.2)
        worker = client.workers[0]
        for others, error in ((("retired",), True), (("lost",), False), ((), True)):
            states = ("stale", *others)
            workers = [msgspec.structs.replace(worker, state=state) for state in states]
            monkeypatch.setattr(sglrl.Client, "workers", workers)
            with pytest.raises(sglrl.WeightsLost if error else sglrl.DeadlineExceeded):
                await run.take(timeout=None if error else 0.3)
            with pytest.raises(sglrl.WeightsLost if error else sglrl.DeadlineExceeded):
                await run.pause(timeout=None if error else 0.3)
            run.resume()
        monkeypatch.undo()
        await client.resume()
        assert len(await run.take()) == 1
