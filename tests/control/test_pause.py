"""Pause, resume and abort with the fake engine: full windows, lost workers, hangs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.driver.driver import now

IDS = [3, 1, 4, 1, 5]
HANG_TIMEOUT = 2.0


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    """A pool with small engine windows and a small queue at the driver."""
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        window=4,
        tokens_per_step=1,
        step_seconds=0.001,
        hang_timeout=HANG_TIMEOUT,
    ) as client:
        yield client


def begin(client: sglrl.Client, count: int, tokens: int = 400, **more: Any) -> list[Any]:
    return [
        asyncio.ensure_future(
            client.generate(input_ids=[*IDS, i], max_new_tokens=tokens, logprobs=True, **more)
        )
        for i in range(count)
    ]


async def until_running(client: sglrl.Client, count: int) -> None:
    async with asyncio.timeout(300):
        while sum(s.engine.running for s in await client.stats()) < count:
            pass


def check(made: list[sglrl.Completion], tokens: int = 400) -> None:
    for i, completion in enumerate(made):
        assert completion.output_ids.tolist() == ([*IDS, i] * tokens)[:tokens]
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_nothing_moves_until_resumed(client: sglrl.Client, mode: Any) -> None:
    # More calls than both windows hold. The resume message must reach the workers all the same.
    calls = begin(client, 12)
    await asyncio.sleep(0)
    await client.pause(mode)
    await client.pause(mode)
    others = begin(client, 3)
    scored = asyncio.ensure_future(client.score(IDS))
    asked = asyncio.ensure_future(client.next_token_logprobs(IDS))
    # Longer than a worker that is not paused may make no progress.
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=IDS, timeout=1.5 * HANG_TIMEOUT)
    assert not any(call.done() for call in [*calls, *others, scored, asked])
    assert [w.state for w in client.workers] == ["ready", "ready"]
    await client.resume()
    await client.resume()
    check(await asyncio.gather(*calls))
    check(await asyncio.gather(*others))
    assert len(await scored) == 5
    assert int((await asked).logprobs.argmax()) == 5


async def test_a_replacement_is_paused_too(client: sglrl.Client) -> None:
    calls = begin(client, 12)
    await asyncio.sleep(0)
    await client.pause()
    os.kill(client.workers[0].pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while client.workers[0].state == "ready":
            await client.requests.driver.change()
    await client.wait_until_full()
    (added,) = await client.add_workers()
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=IDS, timeout=1.5 * HANG_TIMEOUT)
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=IDS, timeout=0.1, worker=added)
    assert not any(call.done() for call in calls)
    await client.resume()
    check(await asyncio.gather(*calls))


async def test_abort_returns_what_there_is(client: sglrl.Client) -> None:
    """Abort returns the tokens of running calls, and of calls that wait at the driver."""
    calls = begin(client, 12, tokens=20_000)
    await until_running(client, 8)
    assert await client.abort() == 12
    made = await asyncio.gather(*calls)
    for i, completion in enumerate(made):
        tokens = completion.output_ids.tolist()
        assert tokens == ([*IDS, i] * 4000)[: len(tokens)]
        assert len(completion.logprobs) == len(tokens) < 20_000
        assert completion.finish_reason == "abort"
        assert completion.resumed == 0
        assert (completion.worker == -1) == (i >= 8)
        assert completion.timing.total >= completion.timing.queued >= 0
    assert sum(len(c.output_ids) for c in made) > 0
    assert await client.abort() == 0
    assert all(worker.load == 0 for worker in client.workers)


async def test_abort_of_one_worker(client: sglrl.Client) -> None:
    ended = begin(client, 6, tokens=20_000, worker=1)
    others = begin(client, 4, worker=0)
    await until_running(client, 8)
    assert await client.abort(worker=1) == 6
    assert {c.finish_reason for c in await asyncio.gather(*ended)} == {"abort"}
    check(await asyncio.gather(*others))
    with pytest.raises(sglrl.UsageError, match="no worker 7"):
        await client.abort(worker=7)


@pytest.mark.parametrize("worker", ["1", 1.0, True, np.int64(1)])
async def test_what_is_no_id_of_a_worker(client: sglrl.Client, worker: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="worker must be the id of a worker"):
        await client.abort(worker=worker)
    with pytest.raises(sglrl.UsageError, match="worker must be the id of a worker"):
        await client.remove_worker(worker)
    assert [w.state for w in client.workers] == ["ready", "ready"]


async def test_pausing_with_abort(client: sglrl.Client) -> None:
    calls = begin(client, 12, tokens=20_000)
    await until_running(client, 8)
    await client.pause("abort")
    made = await asyncio.gather(*calls[:8])
    assert {c.finish_reason for c in made} == {"abort"}
    # These calls had not begun: they wait like new calls.
    assert not any(call.done() for call in calls[8:])
    assert await client.abort() == 4
    assert {len(c.output_ids) for c in await asyncio.gather(*calls[8:])} == {0}
    session = client.session(input_ids=IDS)
    turn = asyncio.ensure_future(session.generate(max_new_tokens=400))
    await client.resume()
    assert len((await turn).output_ids) == 400


async def test_a_turn_of_a_session_goes_on(client: sglrl.Client) -> None:
    async with client.session(input_ids=IDS) as session:
        turn = asyncio.ensure_future(session.generate(max_new_tokens=2000))
        await until_running(client, 1)
        assert await client.abort() == 1
        made = await turn
        assert made.output_ids.tolist() == IDS * 400
        assert made.finish_reason == "length"


@pytest.mark.parametrize("how", ["resume", "abort"])
async def test_a_close_that_waits_for_what_is_paused_can_be_helped(
    client: sglrl.Client, how: str
) -> None:
    await client.pause()
    calls = begin(client, 12)
    closing = asyncio.ensure_future(client.close(drain=True))
    await asyncio.sleep(0)
    with pytest.raises(sglrl.Closed, match="being closed"):
        await client.generate(input_ids=IDS)
    if how == "resume":
        await client.resume()
        check(await asyncio.gather(*calls))
    else:
        assert await client.abort() == 12
        assert {c.finish_reason for c in await asyncio.gather(*calls)} == {"abort"}
    await closing


async def test_a_turn_that_went_on_is_one_from_its_beginning(client: sglrl.Client) -> None:
    session = client.session(input_ids=IDS)
    turn = asyncio.ensure_future(session.generate(max_new_tokens=2000))
    await until_running(client, 1)
    (victim,) = (worker for worker in client.workers if worker.load)
    os.kill(victim.pid, signal.SIGKILL)
    async with asyncio.timeout(300):
        while not any(w.load for w in client.workers if w.id != victim.id):
            await client.requests.driver.change()
    before = now()
    assert await client.abort() == 1
    made = await turn
    assert made.submitted_at < before
    assert made.resumed == 1
    assert made.timing.queued <= made.timing.first_token <= made.timing.total
    (told,) = session.trajectory(1.0).turns
    assert (told.seconds, told.resumed) == (made.timing.total, 1)


async def test_what_is_refused(client: sglrl.Client) -> None:
    with pytest.raises(sglrl.UsageError, match="mode"):
        await client.pause("soon")  # type: ignore[arg-type]
    await client.resume()


def test_without_await() -> None:
    with sglrl.blocking("fake", engine="fake") as client:
        client.pause("retract")
        with pytest.raises(sglrl.DeadlineExceeded):
            client.generate(input_ids=IDS, timeout=0.05)
        assert client.abort() == 0
        client.resume()
        assert client.generate(input_ids=IDS, max_new_tokens=1).output_ids.tolist() == [3]
