"""Pausing and resuming a run."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import sglrl

from .agents import (
    ITEMS,
    two_turns,
)


async def test_a_paused_run_samples_nothing(client: sglrl.Client) -> None:
    async with sglrl.rollout(client, two_turns, ITEMS * 50, group_size=2) as run:
        await run.take(5)
        await run.pause(timeout=300)
        turns = run.metrics.turns
        assert not any(w.load for w in client.workers)
        await client.generate(input_ids=[1], max_new_tokens=50)
        assert run.metrics.turns == turns
        run.resume()
        await run.take(20)
        assert run.metrics.turns > turns
        await run.pause(timeout=300)


async def test_a_pause_is_not_counted_against_the_timeout(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, two_turns, ITEMS[:4], timeout=3.0, retries=0)
    async with run:
        await run.pause(timeout=300)
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(1, timeout=3.2)
        run.resume()
        groups = await run.take(4, timeout=300)
    assert len(groups) == 4
    assert run.metrics.samples_lost == {}


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
