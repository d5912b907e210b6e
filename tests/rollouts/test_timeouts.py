"""Agents that take longer than ``timeout``, and time-outs of others."""

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


async def test_stragglers_are_cancelled_counted_and_logged(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = []

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 7 and session.metadata["sample"] == 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(item["id"])
                raise
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, group_size=3, timeout=3.0)
    groups = {g.index: g async for g in run}
    assert cancelled == [7]
    assert len(groups) == 40
    assert (len(groups[7].trajectories), groups[7].failed) == (2, 1)
    assert run.metrics.samples_lost == {"timeout": 1}
    says = "sample 2 of item 7 failed: DeadlineExceeded: the agent took longer than 3 s (timeout)"
    assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == [says]


async def test_a_timeout_of_a_tool_is_an_error_like_others(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 7 and not session.metadata.get("again"):
            raise TimeoutError("the tool is slow")
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, timeout=300, on_error="drop")
    assert len([g async for g in run]) == 39
    assert run.metrics.samples_lost == {"error": 1}, "at once, and with its group"


async def test_who_ends_after_the_timeout_is_too_late(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        reward = await two_turns(session, item)
        if item["id"] == 3:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return reward

    run = sglrl.rollout(client, agent, ITEMS, timeout=3.0, retries=0)
    assert len([g async for g in run]) == len(ITEMS) - 1
    assert run.metrics.samples_lost == {"timeout": 1}


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
    async with sglrl.rollout(client, agent, ITEMS[:1], timeout=3.0, retries=0) as run:
        await begun.wait()
        await run.pause()
        paused.set()
        await gone.wait()
        run.resume()
        with pytest.raises(sglrl.DeadlineExceeded, match=r"longer than 3 s"):
            await run.take(1)
        assert run.metrics.samples_lost == {"timeout": 1}
