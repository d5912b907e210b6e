"""Objects of an answered call are freed at once, without Python's garbage collector.

The collector would have to walk thousands of calls, and would block the event loop meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import sglrl
from sglrl.core.calls import Call
from sglrl.core.rollout_group import Group, Sample
from sglrl.rollouts import Session


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def generate(client: sglrl.Client) -> None:
    await client.generate(input_ids=[1, 2, 3], max_new_tokens=8, logprobs=True)


async def stream(client: sglrl.Client) -> None:
    async for _ in client.stream(input_ids=[1, 2, 3], max_new_tokens=8):
        pass


async def given_up(client: sglrl.Client) -> None:
    async for _ in client.stream(input_ids=[1, 2, 3], max_new_tokens=200):
        break


async def next_token(client: sglrl.Client) -> None:
    await client.next_token_logprobs([1, 2, 3])


async def session(client: sglrl.Client) -> None:
    async with client.session(input_ids=[1, 2]) as session:
        await session.generate(max_new_tokens=4)
        session.observe([3, 4])
        await session.generate(max_new_tokens=4)


async def rollout(client: sglrl.Client) -> None:
    async def agent(session: Session, sample: Any) -> float:
        await session.generate(max_new_tokens=4)
        return 1.0

    async for _ in sglrl.rollout(client, agent, [{"input_ids": [1, i]} for i in range(8)]):
        pass


@pytest.mark.parametrize("what", [generate, stream, given_up, next_token, session, rollout])
async def test_what_was_answered_leaves_nothing_to_collect(
    what: Callable[[sglrl.Client], Awaitable[None]], nothing_collected: None
) -> None:
    async with sglrl.launch("fake", engine="fake", vocab_size=64) as client:
        gc.collect()
        gc.garbage.clear()
        await asyncio.gather(*(what(client) for _ in range(5)))
        gc.collect()
        kept = (Call, Group, Sample, sglrl.Completion, sglrl.Trajectory)
        assert [found for found in gc.garbage if isinstance(found, kept)] == []
