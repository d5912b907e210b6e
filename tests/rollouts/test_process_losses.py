"""Agents' processes that die, or lose their connection: their samples run again."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import sglrl

from .agents import (
    SOME_ITEMS,
    until,
)


async def test_a_process_that_dies_costs_its_samples_a_try(
    client: sglrl.Client, tmp_path: Path
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] == 11:
            # Both samples may come here at the same time, each in its own process.
            with contextlib.suppress(FileExistsError):
                (tmp_path / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        session.metadata["pid"] = os.getpid()
        return float(item["id"])

    run = sglrl.rollout(client, agent, SOME_ITEMS, group_size=2, processes=2, concurrency=8)
    groups = {g.index: g async for g in run}
    assert groups.keys() == {*range(24)}
    assert all(len(group.trajectories) == 2 for group in groups.values())
    assert 1 <= run.metrics.samples_retried <= 8
    assert any(isinstance(error, sglrl.WorkerLost) for error in run.errors)
    # The pool knows only the clients that still exist.
    server = client._server
    assert server is not None
    await until(lambda: not any(peer.calls for peer in server._peers.values()))


async def test_many_that_are_lost_at_once_are_no_failures(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """Many samples are lost at once before any sample has succeeded."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        (tmp_path / f"pid-{os.getpid()}").touch()
        await until(lambda: (tmp_path / "go").exists())
        return 1.0

    items = [{"input_ids": [1 + i], "id": i} for i in range(100)]
    run = sglrl.rollout(client, agent, items, processes=2, concurrency=100, on_error="drop")
    async with run:
        (first, _) = await until(lambda: len(os.listdir(tmp_path)) == 2 and os.listdir(tmp_path))
        os.kill(int(first.split("-")[1]), signal.SIGKILL)
        await until(lambda: run.metrics.samples_retried >= 33)
        (tmp_path / "go").touch()
        assert len(await run.take(100)) == 100
    assert run.metrics.samples_lost == {}


async def test_a_sample_that_kills_its_process_is_dropped_alone(
    client: sglrl.Client,
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 5:
            os._exit(7)
        # Other samples still run when the process exits.
        await session.generate(max_new_tokens=100)
        return 1.0

    for processes, group_size in ((1, 2), (2, 4), (4, 1)):
        run = sglrl.rollout(
            client, agent, SOME_ITEMS, processes=processes, group_size=group_size, concurrency=8
        )
        assert sorted([g.index async for g in run]) == [i for i in range(24) if i != 5]
        assert sum(run.metrics.samples_lost.values()) == group_size
        assert run.metrics.samples_lost["error"] == 1
        assert run.metrics.groups_dropped == 1
    (error,) = {str(e) for e in run.errors if getattr(e, "__notes__", None)}
    # The driver notices the exited process first, or the broken connection when it sends.
    assert "exited with status 7" in error or "its connection is gone" in error


async def test_a_replacement_without_an_agent_gets_no_samples(
    client: sglrl.Client, tmp_path: Path
) -> None:
    class Once:
        def __init__(self) -> None:
            if len(os.listdir(tmp_path)) == 2:
                raise RuntimeError("no licence left")
            (tmp_path / f"pid-{os.getpid()}").touch()

        async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=1)
            await session.generate(max_new_tokens=50)
            return 1.0

    items = [{"input_ids": [1 + i % 900]} for i in range(400)]
    run = sglrl.rollout(client, Once, items, processes=2, concurrency=8, on_error="raise")
    async with run:
        await run.take(10)
        os.kill(int(os.listdir(tmp_path)[0].split("-")[1]), signal.SIGKILL)
        assert len(await run.take(390)) == 390
    assert run.metrics.samples_lost == {}


async def test_processes_that_always_die_end_the_run(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS, processes=4, concurrency=4, retries=100)
    with pytest.raises(sglrl.WorkerLost):
        async for _ in run:
            pass


async def test_a_process_that_is_cut_off_is_replaced(client: sglrl.Client, tmp_path: Path) -> None:
    """The pool has dropped the process's client, like a client that has not read for too long."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        (tmp_path / f"pid-{os.getpid()}").touch()
        await until(lambda: (tmp_path / "go").exists())
        await session.generate(max_new_tokens=1)
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS, processes=2, concurrency=8, retries=0)
    async with run:
        await until(lambda: len(os.listdir(tmp_path)) == 2)
        server = client._server
        assert server is not None
        (first, _) = server._peers.values()
        server._dismiss(first.identity, "it has not read for so long")
        server._forget(first)
        (tmp_path / "go").touch()
        assert len(await run.take(24)) == 24
        await run._runner.host._handle.wait_until_full(20)
    assert run.metrics.samples_lost == {}
    assert run.metrics.samples_retried >= 1
    assert any("lost its connection to the pool" in str(error) for error in run.errors)
