"""Environments that die in the middle of an episode: the sample runs again in another one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from actor_classes import World

import sglrl

from .agents import SOME_ITEMS

pytestmark = pytest.mark.timeout(60)


class Episodes:
    """An agent whose first turn in some episodes kills the worker of its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.worlds: sglrl.ActorHandle

    async def __aenter__(self) -> Episodes:
        self.worlds = await sglrl.spawn(World, replicas=2)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.worlds.close()

    async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
        seen = []
        async with self.worlds.lease() as world:
            assert await world.reset() == 0
            for number in range(4):
                await session.generate(max_new_tokens=2)
                if number == 2 and item["id"] % 8 == 0:
                    # Only one of the item's samples gets here first.
                    with contextlib.suppress(FileExistsError):
                        (self.folder / f"killed-{item['id']}").touch(exist_ok=False)
                        os.kill(await world.pid(), signal.SIGKILL)
                seen.append(await world.step())
            seen.append(await world.steps_so_far())
        session.metadata["seen"] = seen
        return float(item["id"])


@pytest.mark.parametrize("processes", [None, 2])
async def test_no_episode_continues_in_another_environment(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    agent = functools.partial(Episodes, tmp_path)
    settings: dict[str, Any] = {"group_size": 2, "concurrency": 8, "processes": processes}
    async with sglrl.rollout(client, agent, SOME_ITEMS, **settings) as run:
        groups = [group async for group in run]
    assert sorted(group.index for group in groups) == [*range(24)]
    seen = [made.metadata["seen"] for group in groups for made in group.trajectories]
    assert seen == [[1, 2, 3, 4, 4]] * 48
    # Each of the three killed workers cost the one sample that had its lease an attempt.
    assert run.metrics.samples_retried == 3
    assert run.metrics.samples_lost == {}
    assert [type(error) for error in run.errors] == [sglrl.WorkerLost] * 3
