"""Cancellation, deadlines, back-pressure, and workers that die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from actor_classes import Gate, Values
from processes import wait_for_end

import sglrl
from sglrl.driver.worker_processes import Worker


@pytest.fixture
async def gate() -> AsyncIterator[sglrl.ActorHandle]:
    async with sglrl.spawn(Gate) as handle:
        yield handle


@pytest.fixture
async def gates() -> AsyncIterator[sglrl.ActorHandle]:
    async with sglrl.spawn(Gate, replicas=2, restarts=0) as handle:
        yield handle


async def test_cancelling_the_task_stops_the_work(gate: sglrl.ActorHandle) -> None:
    task = asyncio.ensure_future(gate.enter())
    assert await gate.until_begun(1) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await gate.until_cancelled(1) == 0


async def test_a_deadline_stops_the_work(gate: sglrl.ActorHandle) -> None:
    for timeout in (0.05, 1.0, 20.0):
        with pytest.raises(sglrl.DeadlineExceeded, match="deadline"):
            await gate.enter(timeout=timeout)
        if await gate.begun_so_far():
            break
        # On a busy machine the deadline may pass before the work begins.
    assert await gate.until_cancelled(1) == 0


async def test_an_endpoints_own_deadline(gate: sglrl.ActorHandle) -> None:
    with pytest.raises(TimeoutError):
        await gate.enter_shortly()
    begun = await gate.begun_so_far()
    assert await gate.until_cancelled(begun) == 0
    task = asyncio.ensure_future(gate.enter_shortly(timeout=None))
    await gate.until_begun(begun + 1)
    await gate.open()
    assert await task == gate.workers[0].pid


@pytest.mark.parametrize("timeout", [0, 0.0])
async def test_no_time_at_all(gate: sglrl.ActorHandle, timeout: float) -> None:
    with pytest.raises(sglrl.DeadlineExceeded, match="before the call was sent"):
        await gate.enter(timeout=timeout)
    assert await gate.until_begun(0) == 0


@pytest.mark.parametrize(
    "timeout", ["1", True, float("nan"), -1, -0.5, pytest.param(10**400, id="10**400")]
)
async def test_no_time_out(gate: sglrl.ActorHandle, timeout: object) -> None:
    with pytest.raises(sglrl.UsageError, match="timeout"):
        await gate.enter(timeout=timeout)
    assert await gate.until_begun(0) == 0


async def test_leaving_a_stream_stops_the_work(gate: sglrl.ActorHandle) -> None:
    async with aclosing(gate.stream.trickle()) as stream:
        async for item in stream:
            assert item == 0
            await gate.until_begun(1)
            break
    assert await gate.until_cancelled(1) == 0


async def test_an_item_of_another_type_stops_the_work(gate: sglrl.ActorHandle) -> None:
    with pytest.raises(sglrl.SglrlError, match="declares"):
        async for _ in gate.stream.trickle_lies():
            pass
    assert await gate.until_cancelled(1) == 0
    assert gate.workers[0].load == 0


async def test_an_unread_stream_has_a_deadline_too(gate: sglrl.ActorHandle) -> None:
    got = []
    with pytest.raises(sglrl.DeadlineExceeded):
        async for item in gate.stream.trickle(timeout=2.0):
            got.append(item)
    assert got == [0]
    assert await gate.until_cancelled(1) == 0


async def test_the_window_holds_at_the_worker() -> None:
    async with sglrl.spawn(Gate, window=3) as gate:
        await asyncio.gather(*(gate.turn() for _ in range(50)))
        assert await gate.most_at_once() == 3


async def test_a_full_queue() -> None:
    async with sglrl.spawn(Gate, window=2, max_queue=3) as gate:
        first = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        others = [asyncio.ensure_future(gate.enter()) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(sglrl.Overloaded, match="max_queue=3"):
            await gate.enter()
        # A call that is cancelled in the queue frees its place, and is never sent to the worker.
        others[-1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await others[-1]
        begun = asyncio.ensure_future(gate.begun_so_far())
        await asyncio.sleep(0)
        for task in (*others[1:], first):
            task.cancel()
        assert await begun == 2
        others[0].cancel()
        assert await gate.until_cancelled(2) == 0


async def test_calls_cancelled_before_they_begin_leave_the_window() -> None:
    async with sglrl.spawn(Gate, window=2) as gate:
        for _ in range(6):
            calls = [asyncio.ensure_future(gate.enter()) for _ in range(2)]
            # The call is submitted in one turn and sent in the next. The cancellation follows at
            # once.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
        await gate.turn()


async def test_idempotent_calls_move_when_their_worker_is_killed(
    gates: sglrl.ActorHandle,
) -> None:
    first, second = gates.workers
    moving = [asyncio.ensure_future(gates.enter_again()) for _ in range(6)]
    fixed = asyncio.ensure_future(gates[0].enter())
    lost = asyncio.ensure_future(gates[0].enter())
    await gates[0].until_begun(5)
    await gates[1].until_begun(3)
    os.kill(first.pid, signal.SIGKILL)
    for task in (fixed, lost):
        with pytest.raises(sglrl.WorkerLost) as caught:
            await task
        assert caught.value.worker == 0
    assert await gates[1].until_begun(6) == 6
    await gates.open()
    assert await asyncio.gather(*moving) == [second.pid] * 6
    assert [w.state for w in gates.workers] == ["retired", "ready"]
    # The pool keeps serving. Calls that are pinned to the lost worker fail at once.
    assert await gates.enter() == second.pid
    assert await gates.broadcast.enter() == [second.pid]
    with pytest.raises(sglrl.WorkerLost, match="worker 0"):
        await gates[0].enter()


async def test_a_stream_that_has_begun_is_not_repeated(gates: sglrl.ActorHandle) -> None:
    async with aclosing(gates[0].stream.trickle()) as stream:
        assert await anext(stream) == 0
        os.kill(gates.workers[0].pid, signal.SIGKILL)
        with pytest.raises(sglrl.WorkerLost):
            await anext(stream)


async def test_the_last_worker_lost_ends_every_call() -> None:
    async with sglrl.spawn(Gate, window=2, restarts=0) as gate:
        calls = [asyncio.ensure_future(gate.enter_again()) for _ in range(10)]
        await gate.until_begun(1)
        os.kill(gate.workers[0].pid, signal.SIGKILL)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} == {sglrl.WorkerLost}
        with pytest.raises(sglrl.WorkerLost):
            await gate.enter_again()


async def test_closing_ends_calls_with_closed() -> None:
    async with sglrl.spawn(Gate, window=2) as gate:
        calls = [asyncio.ensure_future(gate.enter()) for _ in range(5)]
        await gate.until_begun(1)
        await gate.close()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} == {sglrl.Closed}
        with pytest.raises(sglrl.Closed):
            await gate.enter()


async def test_an_exception_in_the_body_ends_the_pool() -> None:
    # The fixtures report leftover tasks and processes.
    with pytest.raises(ZeroDivisionError):
        async with sglrl.spawn(Gate, replicas=2) as gate:
            task = asyncio.ensure_future(gate.enter())
            await gate.until_begun(0)
            raise ZeroDivisionError
    with pytest.raises(sglrl.Closed):
        await task


async def test_cancelled_while_it_starts() -> None:
    for _ in range(3):
        handle = sglrl.spawn(Values)
        task = asyncio.ensure_future(handle.__aenter__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_worker_that_stops_is_killed_when_the_pool_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: dict[int, int] = {}
    async with sglrl.spawn(Values, replicas=2) as values:
        pids = [worker.pid for worker in values.workers]
        processes = values._pool._processes
        on_exited = processes._on_worker_exited

        def exited(worker: Worker, status: int) -> None:
            exits[worker.index] = status
            on_exited(worker, status)

        monkeypatch.setattr(processes, "_on_worker_exited", exited)
        os.kill(pids[0], signal.SIGSTOP)
        values._pool._config = type(values._pool._config)(shutdown_timeout=0.2)
    # The pool has waited for both exits.
    assert sorted(exits) == [0, 1]
    assert exits[0] == -signal.SIGKILL
    assert wait_for_end(pids, 0.0) == []


@pytest.mark.parametrize("bound", ["MAX_UNREAD_ITEMS", "MAX_UNREAD_BYTES"])
async def test_a_stream_that_is_not_read_is_stopped(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(f"sglrl.actors.replies.{bound}", 100)
    async with sglrl.spawn(Values) as values, aclosing(values.stream.count(1 << 40)) as stream:
        assert await anext(stream) == 0
        # The stream keeps running until the worker has received its cancellation. Only then is its
        # slot free.
        while values.workers[0].load:
            await values.pid()
        read = 1
        with pytest.raises(sglrl.Overloaded, match="items of this stream were not read"):
            async for item in stream:
                assert item == read
                read += 1
        assert 50 < read < 10_000
        assert await values.add(1) == 11
