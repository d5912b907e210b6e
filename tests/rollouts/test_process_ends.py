"""Start, pause and end of runs whose agents run in their own processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import descendants, wait_for_end

import sglrl
from sglrl.sessions.session import Session
from sglrl.sessions.session_spec import SessionSpec

from .agents import (
    FAKE,
    SOME_ITEMS,
    nested_agent,
    until,
)


async def test_the_pools_end_ends_the_run() -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        while True:
            await session.generate(max_new_tokens=2)
            session = Session(SessionSpec(session.spec.requests, input_ids=[1]))

    async with sglrl.launch("fake", **FAKE) as client:
        run = sglrl.rollout(client, agent, SOME_ITEMS, processes=2, retries=1000)
        async with run:
            taking = asyncio.ensure_future(run.take(1))
            await until(lambda: run.metrics.samples_running == 24)
            await client.close()
            with pytest.raises(sglrl.SglrlError):
                await taking


async def test_leaving_early_leaves_nothing(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"]:
            try:
                (tmp_path / f"waits-{item['id']}").touch()
                await asyncio.Event().wait()
            finally:
                (tmp_path / f"cancelled-{item['id']}").touch()
        return 1.0

    before = set(descendants())
    run = sglrl.rollout(client, agent, SOME_ITEMS[:8], processes=2, concurrency=8)
    async with run:
        assert [group.index for group in await run.take(1)] == [0]
        await until(lambda: len(os.listdir(tmp_path)) == 7)
    assert len(os.listdir(tmp_path)) == 14
    new = {pid: name for pid, name in descendants().items() if pid not in before}
    assert not [name for name in new.values() if "spare" not in name and "fork" not in name], new
    assert await client.generate(input_ids=[1], max_new_tokens=1)


def slow(folder: Path) -> type[Any]:
    """Return an agent class whose start creates ``started``, and ends when ``go`` exists."""

    class Slow:
        async def __aenter__(self) -> Slow:
            (folder / "started").touch()
            await until((folder / "go").exists)
            return self

        async def __aexit__(self, *exc: object) -> None: ...

        async def __call__(self, session: sglrl.Session, item: Any) -> float:
            return 1.0

    return Slow


async def test_a_client_that_is_closed_while_a_run_starts(tmp_path: Path) -> None:
    for processes in (None, 2):
        folder = tmp_path / f"{processes}"
        folder.mkdir()
        async with sglrl.launch("fake", **FAKE) as client:
            run = sglrl.rollout(client, slow(folder), SOME_ITEMS, processes=processes)
            entering = asyncio.ensure_future(run.__aenter__())
            await until((folder / "started").exists)
            closing = asyncio.ensure_future(client.close())
            await asyncio.sleep(0)
            (folder / "go").touch()
            await closing
            with pytest.raises(sglrl.SglrlError):
                await entering


@pytest.mark.parametrize("processes", [None, 2])
async def test_closing_a_run_while_it_starts(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    run = sglrl.rollout(client, slow(tmp_path), SOME_ITEMS, processes=processes)
    entering = asyncio.ensure_future(run.__aenter__())
    await until((tmp_path / "started").exists)
    closing = asyncio.ensure_future(run.close())
    await asyncio.sleep(0)
    (tmp_path / "go").touch()
    await closing
    with pytest.raises(sglrl.SglrlError):
        await entering
    assert run.metrics.samples_running == 0


async def test_a_close_that_is_cancelled_twice_ends_the_processes(client: sglrl.Client) -> None:
    async def work(run: sglrl.Rollout) -> None:
        async with run:
            await asyncio.Event().wait()

    pids = []
    for turns in range(1, 5):
        run = sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=1)
        task = asyncio.ensure_future(work(run))
        await until(lambda run=run: run.metrics.samples_done)  # type: ignore[misc]
        pids += [worker.pid for worker in run._runner.host._handle.workers]
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert run._runner.host.driver.fabric.closed
    # Nobody waits for a process whose close was cancelled, but the fork server kills it.
    assert not wait_for_end(pids, 30)


async def test_pausing_before_and_after(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=1)
    await run.pause(timeout=1)
    async with run:
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(1, timeout=0.3)
        run.resume()
        assert len(await run.take(24)) == 24
    await run.pause(timeout=1)
    run.resume()


async def test_a_pause_that_ended_before_the_run_began(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=1)
    await run.pause()
    run.resume()
    assert len([g async for g in run]) == 24


async def test_a_paused_run_samples_nothing(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        for _ in range(120):
            await session.generate(max_new_tokens=2)
        return 1.0

    async def generated() -> int:
        return sum(s.engine.generated_tokens for s in await client.stats())

    run = sglrl.rollout(client, agent, SOME_ITEMS, processes=2, concurrency=12)
    async with run:
        while not await generated():
            pass
        for _ in range(3):
            await run.pause(timeout=10)
            before = await generated()
            await client.generate(input_ids=[1], max_new_tokens=50)
            assert await generated() == before + 50
            assert run.metrics.samples_running
            run.resume()
        assert len(await run.take(24)) == 24
    assert run.metrics.samples_lost == {}


async def test_a_process_that_comes_while_the_run_is_paused(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """Samples that wait for the new process begin no turns during the pause."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        (tmp_path / str(os.getpid())).touch()
        await until(lambda: (tmp_path / "go").exists())
        (tmp_path / f"asks-{os.getpid()}").touch()
        await session.generate(max_new_tokens=2)
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS, processes=1, concurrency=4, retries=5)
    async with run:
        (first,) = await until(lambda: os.listdir(tmp_path))
        os.kill(int(first), signal.SIGKILL)
        # The killed process's samples will be retried; they wait for its replacement.
        await until(lambda: run.metrics.samples_retried == 4)
        await run.pause(timeout=10)
        (tmp_path / "go").touch()
        await until(lambda: len(os.listdir(tmp_path)) == 4)
        await client.generate(input_ids=[1], max_new_tokens=50)
        assert sum(s.engine.generated_tokens for s in await client.stats()) == 50
        run.resume()
        assert len(await run.take(24)) == 24
    assert run.metrics.samples_retried == 4
