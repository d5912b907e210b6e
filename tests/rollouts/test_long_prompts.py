"""An item whose prompt leaves no room for a response is named before its agents fail."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

import sglrl

pytestmark = pytest.mark.timeout(60)
# The client has a context of 256 tokens.
ITEMS = [
    {"input_ids": [1, 2, 3]},
    {"input_ids": [5] * 300},
    {"input_ids": [6] * 256},
    {"input_ids": [7] * 255},
]
SAYS = "its prompt has {} tokens, and together with a response at most 256 are possible"


async def test_a_warning_before_the_agent_runs(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[tuple[int, int]] = []
    seen: dict[int, list[str]] = {}

    async def agent(session: sglrl.Session, item: Any) -> float:
        index = session.metadata["item"]
        begun.append((index, session.metadata["sample"]))
        seen.setdefault(index, [r.message for r in caplog.records])
        await asyncio.sleep(0)  # an environment that takes its time
        try:
            await session.generate(max_new_tokens=8)
        except sglrl.SglrlError as error:
            raise RuntimeError("the agent has another error") from error
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, group_size=2, retries=3, concurrency=1)
    with caplog.at_level(logging.WARNING, "sglrl.rollout"):
        groups = {group.index: group async for group in run}
    assert groups.keys() == {0, 3}
    assert [t.turns[0].stop - t.turns[0].start for t in groups[3].trajectories] == [1, 1]
    # No sample runs again. A group ends when it has too few samples left.
    assert begun == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1)]
    assert run.metrics.samples_retried == 0
    for index, size in ((1, 300), (2, 256)):
        named = [
            r.message for r in caplog.records if r.message.startswith(f"item {index} cannot be")
        ]
        assert len(named) == 1, "once for each item"
        assert SAYS.format(size) in named[0]
        assert named[0] in seen[index], "before its first agent runs"
    assert not [r for r in caplog.records if r.message.startswith(("item 0", "item 3"))]


async def test_in_processes(client: sglrl.Client) -> None:
    def failing() -> Any:
        async def agent(session: sglrl.Session, item: Any) -> float:
            try:
                await session.generate(max_new_tokens=8)
            except Exception as error:
                raise ValueError("the agent has another error") from error
            return 1.0

        return agent

    run = sglrl.rollout(client, failing(), ITEMS[:2], group_size=2, retries=3, processes=1)
    async with run:
        groups = [group async for group in run]
    assert [group.index for group in groups] == [0]
    assert run.metrics.samples_retried == 0
    assert sum(run.metrics.samples_lost.values()) == 2
    assert all(SAYS.format(300) in str(error) for error in run.errors)


async def test_agents_may_still_shorten_it(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        async with client.session(input_ids=item["input_ids"][:9]) as short:
            await short.generate(max_new_tokens=2)
            return short.trajectory(1.0)

    groups = [group async for group in sglrl.rollout(client, agent, ITEMS[1:2])]
    assert [len(group.trajectories[0].prompt_ids) for group in groups] == [9]
