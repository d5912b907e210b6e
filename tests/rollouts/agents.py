"""Agents and items that several tests of rollouts use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import sglrl

FAKE: dict[str, Any] = {
    "engine": "fake",
    "replicas": 2,
    "tokens_per_step": 4,
    "vocab_size": 1000,
    "context_length": 256,
}
ITEMS = [{"input_ids": [1 + i % 900, 2, 3], "id": i} for i in range(40)]
SOME_ITEMS = ITEMS[:24]


async def one_turn(session: sglrl.Session, item: Any) -> float:
    await session.generate(max_new_tokens=2)
    return 1.0


async def two_turns(session: sglrl.Session, item: dict[str, Any]) -> float:
    first = await session.generate(max_new_tokens=6)
    assert first.output_ids.tolist() == (item["input_ids"] * 2)[:6]
    session.observe([7, 8])
    second = await session.generate(max_new_tokens=3)
    assert second.prompt_ids.tolist() == [*item["input_ids"], *first.output_ids.tolist(), 7, 8]
    return float(item["id"])


async def of_now(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
    """Run ``two_turns``, and give the tokens the weights' version, as a real engine does."""
    version = session.spec.requests.weights.version
    reward = await two_turns(session, item)
    made = session.trajectory(reward)
    return made.replace(versions=np.where(made.loss_mask, version, -1))


def nested_agent() -> Callable[..., Any]:
    """Return an agent that is defined in a function, and is therefore pickled by value."""

    async def two_turns(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=6)
        session.reward(0.5)
        session.observe([7, 8])
        await session.generate(max_new_tokens=3)
        session.metadata["pid"] = os.getpid()
        return float(item["id"])

    return two_turns


async def until(condition: Callable[[], Any]) -> Any:
    """Poll until another process has written its result. No event reports that."""
    async with asyncio.timeout(300):
        while not (found := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


def new_weights(client: sglrl.Client) -> None:
    """Raise the version as an update does. Tokens still have the version of the fake engine."""
    weights = client.pool.weights
    weights.versions.current += 1
    for listener in list(weights.on_version):
        listener()
