"""Agents that fail in their own processes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sglrl

from .agents import (
    SOME_ITEMS,
    until,
)


async def test_errors_are_told_and_run_again(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        try:
            (tmp_path / f"{item['id']}-{session.metadata['sample']}").touch(exist_ok=False)
        except FileExistsError:
            return 1.0
        raise KeyError(f"the environment of {item['id']} broke")

    run = sglrl.rollout(client, agent, SOME_ITEMS[:4], group_size=2, processes=2)
    assert len([g async for g in run]) == 4
    assert run.metrics.samples_retried == 8
    assert run.metrics.turns == 16, "those of failed samples count"
    error = run.errors[0]
    assert isinstance(error, sglrl.RemoteError)
    assert error.kind == "KeyError"
    assert "in agent" in error.traceback
    assert __file__ in error.traceback


async def test_an_error_may_end_the_run(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 5:
            raise ValueError("the environment broke")
        return 1.0

    with pytest.raises(sglrl.RemoteError, match="ValueError: the environment broke"):
        async for _ in sglrl.rollout(client, agent, SOME_ITEMS, on_error="raise", processes=2):
            pass


async def test_errors_of_sglrl_are_what_they_are_here(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 0:
            await session.generate(max_new_token=1)
        if item["id"] == 1:
            raise sglrl.DeadlineExceeded("a tool took too long")
        if item["id"] == 2:
            session.metadata["lock"] = threading.Lock()
        if item["id"] == 3:
            return "a text"  # type: ignore[return-value]
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS[:8], processes=1, retries=1)
    assert sorted([g.index async for g in run]) == [4, 5, 6, 7]
    kinds = {type(error).__name__ for error in run.errors}
    assert kinds == {"InvalidRequest", "DeadlineExceeded", "UsageError"}
    # Samples that fail because of their own input are not retried, and neither is their group.
    assert run.metrics.samples_retried == 1
    said = "".join(map(str, run.errors))
    for text in ("did you mean", "metadata of this trajectory cannot be sent", "must return its"):
        assert text in said


async def test_errors_of_others_with_names_of_sglrls(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        class InvalidRequest(Exception):
            pass

        await session.generate(max_new_tokens=1)
        if item["id"] == 1:
            raise InvalidRequest("of a tool")
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS[:3], processes=1, retries=1)
    assert sorted([g.index async for g in run]) == [0, 2]
    error = run.errors[0]
    assert isinstance(error, sglrl.RemoteError)
    assert (error.kind, "in agent" in error.traceback) == ("InvalidRequest", True)
    assert run.metrics.samples_retried == 1


@pytest.mark.parametrize("processes", [None, 1])
async def test_what_ends_a_program_ends_the_run(
    client: sglrl.Client, processes: int | None
) -> None:
    class Panic(BaseException):
        pass

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        raise Panic("an extension's")

    error = sglrl.SglrlError if processes else Panic
    with pytest.raises(error, match="an extension's"):
        async for _ in sglrl.rollout(client, agent, SOME_ITEMS, processes=processes):
            pass


async def test_agents_that_cancel_themselves_have_failed(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS[:3], processes=1, retries=0)
    assert sorted([g.index async for g in run]) == [0, 2]
    assert "cancelled by something that it awaited" in str(run.errors[-1])


@pytest.mark.parametrize("processes", [None, 1])
async def test_who_computes_for_too_long_is_late(
    client: sglrl.Client, processes: int | None
) -> None:
    """A sample times out, even if its process could not report during the computation."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1:
            time.sleep(2.5)  # noqa: ASYNC251
        return 1.0

    run = sglrl.rollout(
        client, agent, SOME_ITEMS[:4], processes=processes, timeout=2.0, concurrency=1, retries=0
    )
    assert sorted([g.index async for g in run]) == [0, 2, 3]
    assert run.metrics.samples_lost == {"timeout": 1}


async def test_an_agent_that_is_not_async_ends_the_run(client: sglrl.Client) -> None:
    def agent(session: sglrl.Session, item: Any) -> float:
        return 1.0

    with pytest.raises(sglrl.UsageError, match="the agent must be async: it returned"):
        async for _ in sglrl.rollout(client, agent, SOME_ITEMS, processes=1):  # type: ignore[arg-type]
            pass


async def test_an_agent_that_never_works_is_not_run_over_all_data(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        raise RuntimeError("nothing works")

    endless = (SOME_ITEMS[i % 24] for i in range(10**9))
    with pytest.raises(sglrl.RemoteError, match="nothing works") as caught:
        async for _ in sglrl.rollout(client, agent, endless, processes=2):
            pass
    assert "none of the first 32 samples" in "".join(caught.value.__notes__)


async def test_stragglers_are_cancelled_and_counted(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 7:
            try:
                await asyncio.Event().wait()
            finally:
                (tmp_path / "cancelled").touch()
        return 1.0

    run = sglrl.rollout(client, agent, SOME_ITEMS[:9], timeout=3.0, processes=2, retries=0)
    assert sorted([g.index async for g in run]) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert run.metrics.samples_lost == {"timeout": 1}
    assert "took longer than 3 s" in str(run.errors[-1])
    assert (tmp_path / "cancelled").exists()


async def test_a_group_that_is_given_up_takes_its_samples_with_it(
    client: sglrl.Client, tmp_path: Path
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1 and session.metadata["sample"]:
            try:
                (tmp_path / "waits").touch()
                await asyncio.Event().wait()
            finally:
                (tmp_path / "cancelled").touch()
        if item["id"] == 1:
            await until(lambda: (tmp_path / "waits").exists())
            raise RuntimeError("the other one is of no use then")
        return 1.0

    run = sglrl.rollout(
        client, agent, SOME_ITEMS[:3], group_size=2, on_error="drop", retries=0, processes=2
    )
    assert sorted([g.index async for g in run]) == [0, 2]
    assert run.metrics.samples_lost == {"error": 1, "given up": 1}
    await until(lambda: (tmp_path / "cancelled").exists())


async def test_turns_of_what_was_given_up_count(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=3)
        if item["id"] == 1 and session.metadata["sample"]:
            (tmp_path / "waits").touch()
            await asyncio.Event().wait()
        if item["id"] == 1:
            await until(lambda: (tmp_path / "waits").exists())
            raise RuntimeError("the other one is of no use then")
        if item["id"] == 2:
            await until(lambda: (tmp_path / "last").exists())
        return 1.0

    run = sglrl.rollout(
        client, agent, SOME_ITEMS[:3], group_size=2, on_error="drop", retries=0, processes=1
    )
    async with run:
        await run.take(1)
        await until(lambda: run.metrics.samples_lost.get("given up"))
        (tmp_path / "last").touch()
        await run.take(1)
        assert (run.metrics.turns, run.metrics.generated_tokens) == (6, 18)
