"""Agents that continue after they were cancelled.

The run gives them a grace period. Then the run continues or ends without them, and logs where they
wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import at_once

import sglrl
from sglrl.rollouts import task_ending

from .agents import until

ITEMS = [{"input_ids": [1, 2, 3], "id": i} for i in range(3)]


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", engine="fake", vocab_size=1000, context_length=256) as client:
        yield client


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_ending, "GRACE_SECONDS", 0.5)


@pytest.fixture
def noise(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """Return the messages that asyncio has logged: destroyed tasks, unretrieved exceptions."""
    caplog.set_level(logging.INFO)

    def found() -> list[str]:
        gc.collect()
        return [r.getMessage() for r in caplog.records if r.name == "asyncio"]

    yield found
    assert not found()


async def once(session: sglrl.Session) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


async def always(session: sglrl.Session) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def shields(session: sglrl.Session) -> None:
    forever = asyncio.get_running_loop().create_future()
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(forever)


async def waits_in_finally(session: sglrl.Session) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.Event().wait()


async def swallows_everything(session: sglrl.Session) -> None:
    for _ in range(100):
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()


# The interpreter reports the exception when it collects the coroutine of ``swallows_everything``.
UNRAISABLE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
HANGS = [once, always, shields, waits_in_finally]
hangs = pytest.mark.parametrize(
    "hang",
    [
        *HANGS,
        pytest.param(swallows_everything, marks=UNRAISABLE),
    ],
    ids=lambda hang: hang.__name__,
)


def agent_of(hang: Callable[[sglrl.Session], Any], begun: asyncio.Event) -> Any:
    """Return an agent that hangs at item 1, until the weights are new."""

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1 and not session.oldest_version:
            begun.set()
            await hang(session)
        return 1.0

    return agent


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if r.name == "sglrl.rollout" and r.levelname == "ERROR"]
    return [r.getMessage() for r in records]


@hangs
@pytest.mark.usefixtures("short_grace")
async def test_leaving_a_run(
    hang: Any, client: sglrl.Client, caplog: pytest.LogCaptureFixture, noise: Any
) -> None:
    begun = asyncio.Event()
    async with sglrl.rollout(client, agent_of(hang, begun), ITEMS) as run:
        await begun.wait()
    assert run.metrics.samples_running == 0
    (error,) = errors(caplog)
    assert "agent_of.<locals>.agent with sample 0 of item 1 was cancelled (the run has" in error
    assert f"in {hang.__name__}\n" in error
    assert "agent_tasks.py" not in error, "the stack begins with the agent"
    # The remaining tasks block neither the loop nor the program.
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("short_grace")
async def test_an_agent_that_waits_for_a_task_of_its_own(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, noise: Any
) -> None:
    """The agent's cancellation reaches its inner task, which swallows the cancellation."""
    begun, stop = asyncio.Event(), asyncio.Event()
    inner: list[asyncio.Task[None]] = []

    async def stubborn() -> None:
        while not stop.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await stop.wait()

    async def hang(session: sglrl.Session) -> None:
        inner.append(asyncio.ensure_future(stubborn()))
        await inner[0]

    async with sglrl.rollout(client, agent_of(hang, begun), ITEMS):
        await begun.wait()
        await asyncio.sleep(0)
    assert "in hang\n" in errors(caplog)[0]
    stop.set()
    await inner[0]


@pytest.mark.parametrize(
    "some",
    [HANGS, pytest.param([swallows_everything], marks=UNRAISABLE)],
    ids=["hangs", "swallows"],
)
@pytest.mark.usefixtures("short_grace")
async def test_what_is_late_is_lost_and_the_run_goes_on(
    some: list[Any], client: sglrl.Client, caplog: pytest.LogCaptureFixture, noise: Any
) -> None:
    async def late(hang: Any) -> None:
        agent = agent_of(hang, asyncio.Event())
        run = sglrl.rollout(client, agent, ITEMS, timeout=2.0, retries=1, concurrency=1)
        groups = [group.index async for group in run]
        assert sorted(groups) == [0, 2]
        assert run.metrics.samples_lost == {"timeout": 2}, "it was tried again"
        assert [type(error) for error in run.errors] == [sglrl.DeadlineExceeded] * 2

    await at_once(late, some)
    found = errors(caplog)
    assert len(found) == 2 * len(some)
    for hang in some:
        its = [error for error in found if f"in {hang.__name__}\n" in error]
        assert len(its) == 2
        assert "(timeout)" in its[0]


@pytest.mark.usefixtures("short_grace")
async def test_what_is_stale_is_sampled_again(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, noise: Any
) -> None:
    begun = asyncio.Event()
    run = sglrl.rollout(
        client, agent_of(always, begun), ITEMS, batch_size=3, max_staleness=0, retries=0
    )
    async with run:
        await begun.wait()
        await run.take(2)
        await client.update_weights({"w": torch.zeros(1)})
        assert [group.index for group in await run.take(1)] == [1]
    assert run.metrics.samples_lost == {"stale": 1}
    assert "(stale)" in errors(caplog)[0]


@pytest.mark.usefixtures("short_grace")
async def test_an_error_that_ends_the_run_is_raised(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, noise: Any
) -> None:
    begun = asyncio.Event()
    hanging = agent_of(always, begun)

    async def agent(session: sglrl.Session, item: Any) -> float:
        if item["id"] == 2:
            await begun.wait()
            raise LookupError("the environment broke")
        reward: float = await hanging(session, item)
        return reward

    with pytest.raises(LookupError, match="the environment broke"):
        async for _ in sglrl.rollout(client, agent, ITEMS, on_error="raise", concurrency=3):
            pass
    assert len(errors(caplog)) == 1


async def test_an_agent_has_its_time_although_others_hold_up_the_loop(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_ending, "GRACE_SECONDS", 2.0)
    begun, ends, cleaned = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ends.set()
            for _ in range(100):
                await asyncio.sleep(0)
            cleaned.set()
        return 1.0

    async with sglrl.rollout(client, agent, ITEMS[:1]) as run:
        await begun.wait()
        closing = asyncio.ensure_future(run.close())
        await ends.wait()
        # Block the loop.
        time.sleep(2.5)  # noqa: ASYNC251
        await closing
    assert cleaned.is_set()
    assert not errors(caplog)


@pytest.mark.usefixtures("short_grace")
async def test_a_data_set_that_hangs(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, noise: Any
) -> None:
    begun = asyncio.Event()

    class Data:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> Any:
            begun.set()
            await always(None)  # type: ignore[arg-type]

    async with sglrl.rollout(client, agent_of(once, begun), Data()):
        await begun.wait()
    (error,) = errors(caplog)
    assert "the data set was cancelled" in error
    assert "in always\n" in error


# --- agents in other processes --------------------------------------------------------------------


def away(hang: str, mark: Path) -> Any:
    """Return an agent that is pickled by value. It creates the file ``mark`` when it hangs."""

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1 and not session.oldest_version:
            mark.touch()  # noqa: ASYNC240
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if hang == "once":
                        await asyncio.Event().wait()
        return 1.0

    return agent


async def test_late_in_another_process(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def late(hang: str) -> None:
        agent = away(hang, tmp_path / hang)
        run = sglrl.rollout(client, agent, ITEMS, timeout=3.0, retries=0, processes=1)
        assert sorted([group.index async for group in run]) == [0, 2]
        assert run.metrics.samples_lost == {"timeout": 1}

    await at_once(late, ["once", "always"])
    found = errors(caplog)
    assert len(found) == 2
    for error in found:
        assert "away.<locals>.agent with sample 0 of item 1 was cancelled (timeout)" in error
        assert "in agent\n" in error


async def test_stale_in_another_process(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    agent = away("always", tmp_path / "hangs")
    run = sglrl.rollout(client, agent, ITEMS, batch_size=3, max_staleness=0, retries=0, processes=1)
    async with run:
        await until((tmp_path / "hangs").exists)
        await run.take(2)
        await client.update_weights({"w": torch.zeros(1)})
        assert [group.index for group in await run.take(1)] == [1]
    assert run.metrics.samples_lost == {"stale": 1}
    assert "in agent\n" in errors(caplog)[0]


async def test_leaving_a_run_with_processes(
    client: sglrl.Client,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    class Agent:
        async def __aenter__(self) -> Agent:
            return self

        async def __aexit__(self, *exc: object) -> None:
            (tmp_path / "left").touch()

        async def __call__(self, session: sglrl.Session, item: Any) -> float:
            (tmp_path / "hangs").touch()
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()

    async with sglrl.rollout(client, Agent, ITEMS[:1], processes=1):
        await until((tmp_path / "hangs").exists)
    assert (tmp_path / "left").exists(), "the process was not killed before it had left the agent"
    printed = capfd.readouterr().err
    assert "Agent with sample 0 of item 0 was cancelled by the run" in printed
    assert "in __call__\n" in printed


# --- a program with a hanging agent ---------------------------------------------------------------

PROGRAM = """
    import asyncio, signal, sys
    import sglrl

    async def agent(session, item):
        print("begun", flush=True)
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass

    async def main():
        async with sglrl.launch("fake", engine="fake") as client:
            async with sglrl.rollout(client, agent, [{"input_ids": [1]}]) as run:
                await run.take()

    asyncio.run(main())
"""


def test_ctrl_c_ends_the_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    with subprocess.Popen(
        [sys.executable, "-X", "dev", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        program.send_signal(2)
        try:
            _, said = program.communicate(timeout=300)
        finally:
            program.kill()
    assert "KeyboardInterrupt" in said
    assert "agent __main__.agent with sample 0 of item 0 was cancelled (the run has ended)" in said
    assert "was destroyed" not in said
    assert "never retrieved" not in said
