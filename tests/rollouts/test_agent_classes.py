"""Agents that are classes, in this process and in others."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import sglrl

from .agents import (
    SOME_ITEMS,
)


@pytest.mark.parametrize("processes", [None, 2])
async def test_a_class_is_made_where_its_agents_run(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    class Agent:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be pickled
            self.entered = False

        async def __aenter__(self) -> Agent:
            self.entered = True
            (tmp_path / f"entered-{os.getpid()}").touch(exist_ok=False)
            return self

        async def __aexit__(self, *exc: object) -> None:
            (tmp_path / f"left-{os.getpid()}").touch(exist_ok=False)

        async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
            with self.lock:
                assert self.entered
            await session.generate(max_new_tokens=1)
            return 1.0

    run = sglrl.rollout(client, Agent, SOME_ITEMS, processes=processes)
    assert len([g async for g in run]) == 24
    names = sorted(name.split("-")[0] for name in os.listdir(tmp_path))
    assert names == ["entered", "left"] if processes is None else ["entered"] * 2 + ["left"] * 2


@pytest.mark.parametrize("processes", [None, 2])
async def test_a_class_of_which_no_instance_can_be_made(
    client: sglrl.Client, processes: int | None
) -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no database")

    class Uncallable:
        pass

    for agent, match in (
        (Broken, "no database"),
        (Uncallable, "Uncallable returned a .*, which cannot be called"),
    ):
        run = sglrl.rollout(client, agent, SOME_ITEMS, processes=processes)
        error = sglrl.WorkerStartError if processes else (RuntimeError, sglrl.UsageError)
        with pytest.raises(error, match=match):
            async with run:
                pass
        with pytest.raises(sglrl.UsageError, match="begun once"):
            async with run:
                pass


@pytest.mark.parametrize("processes", [None, 1])
async def test_a_class_with_arguments(client: sglrl.Client, processes: int | None) -> None:
    class Scaled:
        def __init__(self, scale: float) -> None:
            self.scale = scale
            self.entered = 0

        def __enter__(self) -> Scaled:
            self.entered += 1
            return self

        def __exit__(self, *exc: object) -> None: ...

        async def __call__(self, session: sglrl.Session, item: Any) -> float:
            await session.generate(max_new_tokens=1)
            return self.scale * self.entered

    made = functools.partial(Scaled, 2.5)
    run = sglrl.rollout(client, made, SOME_ITEMS[:2], processes=processes)
    assert [t.reward async for g in run for t in g.trajectories] == [2.5, 2.5]
    with pytest.raises((sglrl.WorkerStartError, TypeError)) as caught:
        async with sglrl.rollout(client, Scaled, SOME_ITEMS, processes=processes):
            pass
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "functools.partial(Scaled, ...)" in said


async def test_it_is_left_in_the_task_in_which_it_was_entered(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """Cancel scopes and task groups must be exited in the task that entered them."""

    class Agent:
        async def __aenter__(self) -> Agent:
            self.task = asyncio.current_task()
            self.group = asyncio.TaskGroup()
            await self.group.__aenter__()
            self.group.create_task(asyncio.sleep(0))
            return self

        async def __aexit__(self, *exc: object) -> None:
            await self.group.__aexit__(None, None, None)
            (tmp_path / str(self.task is asyncio.current_task())).touch()

        async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=1)
            return 1.0

    assert len([g async for g in sglrl.rollout(client, Agent, SOME_ITEMS, processes=1)]) == 24
    assert os.listdir(tmp_path) == ["True"]
