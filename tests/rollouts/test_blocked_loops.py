"""A call that blocks the event loop is logged once, with its stack."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import sglrl
from sglrl.rollouts import blocked_loop
from sglrl.rollouts.blocked_loop import LoopWatch

from .agents import SOME_ITEMS, one_turn

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loop, "BLOCKED_SECONDS", 0.2)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "blocked the event loop" in message]


def until_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Block the event loop until the warning is there, as a long computation would."""
    while not warnings(caplog):
        time.sleep(0.01)


async def test_an_agent_that_blocks(client: sglrl.Client, caplog: pytest.LogCaptureFixture) -> None:
    warned = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] == 3:
            until_warned(caplog)
            warned.set()
        if item["id"] == 9:
            # Turns end in any order, and only the first call that blocks is logged.
            await warned.wait()
            time.sleep(0.5)  # noqa: ASYNC251
        return 1.0

    async with sglrl.rollout(client, agent, SOME_ITEMS) as run:
        assert len([group async for group in run]) == 24
    (said,) = warnings(caplog)
    assert "asyncio.to_thread" in said
    first, *_, last = said.partition("\n")[2].splitlines()
    assert first.endswith("in agent"), "the stack begins with the agent"
    assert __file__ in first
    assert last == "    time.sleep(0.01)"
    assert not [t for t in threading.enumerate() if t.name == "sglrl-loop-watch" and t.is_alive()]


async def test_a_trainer_that_blocks(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainer shares the loop with the agents that should run ahead of it."""
    trained = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"]:
            await trained.wait()
        return await one_turn(session, item)

    async with sglrl.rollout(client, agent, SOME_ITEMS, concurrency=2) as run:
        await run.take(1)
        until_warned(caplog)
        trained.set()
        await run.take(23)
    (said,) = warnings(caplog)
    assert "in until_warned" in said


async def test_agents_in_processes_that_block(
    client: sglrl.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] in (3, 9):
            time.sleep(2.0)  # noqa: ASYNC251
        return 1.0

    async with sglrl.rollout(client, agent, SOME_ITEMS, processes=1) as run:
        assert len([group async for group in run]) == 24
    said = capfd.readouterr().err
    assert said.count("blocked the event loop") == 1
    assert "time.sleep(2.0)" in said


async def test_an_idle_or_busy_loop_is_not_blocked(caplog: pytest.LogCaptureFixture) -> None:
    for is_busy, blocks in ((True, False), (False, True)):
        watch = LoopWatch(lambda is_busy=is_busy: is_busy)  # type: ignore[misc]
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            if not blocks:
                await asyncio.sleep(0)
        watch.close()
    assert not warnings(caplog)
