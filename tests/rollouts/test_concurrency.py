"""The number of samples that run at a time, found from the load of the engines."""

from __future__ import annotations

import asyncio
from typing import Any

import sglrl

from .agents import (
    ITEMS,
)


async def test_the_limit_grows_to_what_the_engines_take() -> None:
    most = 0
    running = 0

    async def agent(session: sglrl.Session, item: Any) -> float:
        nonlocal most, running
        running += 1
        most = max(most, running)
        for _ in range(5):
            await session.generate(max_new_tokens=20)
        running -= 1
        return 1.0

    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=1, step_seconds=0.002, context_length=1000
    ) as client:
        items = [{"input_ids": [1]} for _ in range(5000)]
        async with sglrl.rollout(client, agent, items) as run:
            first = run.metrics.concurrency
            while run.metrics.concurrency < 64 * first:
                await run.take(10)
            assert most > 32 * first


async def test_the_limit_grows_while_turns_are_long() -> None:
    """The engines report their load during a turn, not only at its end."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=5000)
        return 1.0

    async with sglrl.launch(
        "fake",
        engine="fake",
        vocab_size=1000,
        context_length=10_000,
        tokens_per_step=1,
        step_seconds=0.02,
        max_running_requests=256,
    ) as client:
        endless = (ITEMS[i % 40] for i in range(10**9))
        async with sglrl.rollout(client, agent, endless) as run, asyncio.timeout(300):
            while run.metrics.samples_running < 128:
                await client.stats()
            assert run.metrics.turns == 0
