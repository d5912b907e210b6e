"""Leases: an episode keeps the process that has its state, or raises ``WorkerLost``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, nullcontext
from typing import Any

import pytest
from actor_classes import Gate, Values, World

import sglrl


@pytest.fixture
async def worlds() -> AsyncIterator[sglrl.ActorHandle]:
    async with sglrl.spawn(World, replicas=2) as worlds:
        yield worlds


async def kill(handle: sglrl.ActorHandle, pid: int) -> None:
    """Kill a worker and wait for its replacement."""
    os.kill(pid, signal.SIGKILL)
    while pid in {worker.pid for worker in handle.workers}:
        await handle._pool.driver.change()
    await handle.wait_until_full()


async def lost(handle: sglrl.ActorHandle, state: str = "lost") -> None:
    """Wait until the driver knows that a worker is lost."""
    while state not in {worker.state for worker in handle.workers}:
        await handle._pool.driver.change()


@pytest.mark.parametrize("how", ["lease", "index"])
async def test_a_process_that_died_has_no_successor(worlds: sglrl.ActorHandle, how: str) -> None:
    lease: Any = worlds.lease() if how == "lease" else nullcontext(worlds[0])
    async with lease as world:
        assert [await world.step() for _ in range(3)] == [1, 2, 3]
        assert [n async for n in world.stream.steps(2)] == [4, 5]
        pid = await world.pid()
        await kill(worlds, pid)
        for call in (world.step, world.steps_so_far, world.pid):
            with pytest.raises(sglrl.WorkerLost, match="the state of its object") as caught:
                await call()
            assert caught.value.state_lost
        with pytest.raises(sglrl.WorkerLost, match="the state of its object"):
            await anext(world.stream.steps(2))
    # The replacement is new for everybody else.
    assert await worlds[0].step() == 1
    assert await worlds[1].step() == 1
    async with worlds.lease() as first, worlds.lease() as second:
        assert {await first.pid(), await second.pid()} == {w.pid for w in worlds.workers}


@pytest.mark.parametrize("how", ["lease", "index"])
@pytest.mark.parametrize("name", ["enter", "enter_again", "trickle", "trickle_again"])
async def test_calls_in_flight_are_not_repeated(how: str, name: str) -> None:
    """Idempotent calls that are made without a lease run again on the replacement."""
    async with sglrl.spawn(Gate) as gates:
        lease: Any = gates.lease() if how == "lease" else nullcontext(gates[0])
        async with lease as gate:
            assert await gate.begun_so_far() == 0
            if name.startswith("trickle"):
                call = asyncio.ensure_future(anext(getattr(gate.stream, name)()))
                if name == "trickle":
                    await call
                    call = asyncio.ensure_future(call_next(gate.stream.trickle()))
            else:
                call = asyncio.ensure_future(getattr(gate, name)())
            await gate.until_begun(1)
            os.kill(gates.workers[0].pid, signal.SIGKILL)
            with pytest.raises(sglrl.WorkerLost):
                await call
        await gates.wait_until_full()
        assert await gates.begun_so_far() == 0


async def call_next(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


async def test_calls_that_wait_are_not_sent_to_the_replacement() -> None:
    async with sglrl.spawn(Gate, window=2) as gates, gates.lease() as gate:
        running = [asyncio.ensure_future(gate.enter()) for _ in range(2)]
        waiting = asyncio.ensure_future(gate.enter_again())
        await asyncio.sleep(0)
        os.kill(gates.workers[0].pid, signal.SIGKILL)
        ends = await asyncio.gather(*running, waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [sglrl.WorkerLost] * 3
        assert all(isinstance(end, sglrl.WorkerLost) and end.state_lost for end in ends)


async def test_a_loss_before_the_first_call(worlds: sglrl.ActorHandle) -> None:
    async with worlds.lease() as world:
        os.kill(worlds.workers[0].pid, signal.SIGKILL)
        await lost(worlds)
        with pytest.raises(sglrl.WorkerLost):
            await world.steps_so_far()
    assert await worlds.wait_until_full() is None


async def test_each_worker_has_one_lease_at_a_time(worlds: sglrl.ActorHandle) -> None:
    """Episodes wait for a free worker in the order in which they came."""
    order: list[int] = []
    at_once = [0, 0]

    async def episode(number: int) -> list[int]:
        async with worlds.lease() as world:
            order.append(number)
            at_once[0] += 1
            at_once[1] = max(at_once)
            start = await world.reset()
            steps = [await world.step() - start for _ in range(5)]
            at_once[0] -= 1
            return steps

    assert await asyncio.gather(*map(episode, range(40))) == [[1, 2, 3, 4, 5]] * 40
    assert order == [*range(40)]
    assert at_once[1] == 2


async def test_leases_are_shared_evenly(worlds: sglrl.ActorHandle) -> None:
    async with (
        worlds.lease(share=2) as a,
        worlds.lease(share=2) as b,
        worlds.lease(share=2) as c,
        worlds.lease(share=2) as d,
    ):
        pids = [await world.pid() for world in (a, b, c, d)]
        assert sorted(map(pids.count, set(pids))) == [2, 2]
        with pytest.raises(sglrl.DeadlineExceeded, match="4 leases are held"):
            async with worlds.lease(share=2, timeout=0.01):
                pass
        async with worlds.lease(share=3) as e:
            assert await e.pid() in pids


async def test_the_wait_for_a_lease_has_a_deadline(worlds: sglrl.ActorHandle) -> None:
    async with worlds.lease(), worlds.lease():
        with pytest.raises(sglrl.DeadlineExceeded, match="no worker was free for a lease within"):
            async with worlds.lease(timeout=0.01):
                pass
    # A wait that failed reserves nothing.
    async with worlds.lease(timeout=0.01), worlds.lease(timeout=0.01):
        pass
    with pytest.raises(sglrl.UsageError, match="timeout"):
        worlds.lease(timeout=-1.0)
    with pytest.raises(sglrl.UsageError, match="share"):
        worlds.lease(share=0)


@pytest.mark.parametrize("where", ["waiting", "granted", "calling"])
async def test_a_cancelled_episode_releases_its_worker(where: str) -> None:
    async with sglrl.spawn(Gate) as gates:
        entered = asyncio.Event()

        async def episode() -> None:
            async with gates.lease() as gate:
                entered.set()
                await gate.enter()

        if where == "calling":
            task = asyncio.ensure_future(episode())
            await gates.until_begun(1)
            task.cancel()
        else:
            async with gates.lease():
                task = asyncio.ensure_future(episode())
                await asyncio.sleep(0)
                if where == "waiting":
                    task.cancel()
            # The lease is the task's, but the task has not run since.
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert entered.is_set() == (where == "calling")
        async with gates.lease(timeout=10.0) as gate:
            await gate.until_cancelled(1 if where == "calling" else 0)


async def test_the_end_of_a_lease_ends_its_calls() -> None:
    """A call or stream that the episode left running does not reach the next episode."""
    async with sglrl.spawn(Gate) as gates:
        async with gates.lease() as gate:
            left = asyncio.ensure_future(gate.enter())
            stream = gate.stream.trickle()
            assert await anext(stream) == 0
            unread = asyncio.ensure_future(anext(stream))
            await gate.until_begun(2)
        async with gates.lease() as other:
            await other.until_cancelled(2)
        for task in (left, unread):
            with pytest.raises(sglrl.Closed, match="the lease of worker 0 has ended"):
                await task
        with pytest.raises(sglrl.Closed, match="the lease of worker 0 has ended"):
            await gate.begun_so_far()
        async with aclosing(gate.stream.trickle()) as late:
            with pytest.raises(sglrl.Closed, match="the lease of worker 0 has ended"):
                await anext(late)


async def test_a_pool_that_closes_ends_leases() -> None:
    async with sglrl.spawn(Gate) as gates:
        async with gates.lease() as gate:
            waiting = asyncio.ensure_future(gates.lease().__aenter__())
            running = asyncio.ensure_future(gate.enter())
            await gate.until_begun(1)
            await gates.close()
            for task in (waiting, running):
                with pytest.raises(sglrl.Closed):
                    await task
            with pytest.raises(sglrl.Closed):
                await gate.begun_so_far()
        with pytest.raises(sglrl.Closed):
            async with gates.lease():
                pass


async def test_leases_of_a_pool_without_workers() -> None:
    async with sglrl.spawn(World, restarts=0) as worlds, worlds.lease():
        waiting = asyncio.ensure_future(worlds.lease().__aenter__())
        await asyncio.sleep(0)
        os.kill(worlds.workers[0].pid, signal.SIGKILL)
        with pytest.raises(sglrl.WorkerLost, match=r"no worker is left .*SIGKILL"):
            await waiting
        with pytest.raises(sglrl.WorkerLost, match="no worker is left"):
            async with worlds.lease():
                pass


async def test_a_replacement_serves_waiting_episodes() -> None:
    async with sglrl.spawn(World) as worlds, worlds.lease() as world:
        waiting = asyncio.ensure_future(worlds.lease().__aenter__())
        await world.step()
        os.kill(worlds.workers[0].pid, signal.SIGKILL)
        # The dead process is still leased, but its replacement is free.
        other = await waiting
        assert await other.step() == 1
        with pytest.raises(sglrl.WorkerLost):
            await world.step()


async def test_a_worker_that_is_removed(worlds: sglrl.ActorHandle) -> None:
    async with worlds.lease() as first, worlds.lease() as second:
        pids = [await first.pid(), await second.pid()]
        gone = pids.index(worlds.workers[1].pid)
        await worlds.remove_worker(1)
        world, other = ((first, second), (second, first))[gone]
        with pytest.raises(sglrl.WorkerLost) as caught:
            await world.step()
        assert caught.value.state_lost
        assert await other.step() == 1


async def test_wrong_uses(worlds: sglrl.ActorHandle) -> None:
    lease: Any = worlds.lease()
    with pytest.raises(sglrl.UsageError, match="async with"):
        lease.step()
    with pytest.raises(sglrl.UsageError, match="async with"):
        await lease
    with pytest.raises(sglrl.UsageError, match="async with"), lease:
        pass
    async with lease:
        pass
    with pytest.raises(sglrl.UsageError, match="for each episode"):
        async with lease:
            pass
    with pytest.raises(sglrl.Closed, match="async with"):
        sglrl.spawn(Values).lease()


async def test_an_index_is_a_slot_until_its_first_call() -> None:
    """The first call of ``handle[i]`` may run again on the replacement, and later ones may not."""
    async with sglrl.spawn(Gate) as gates:
        first = gates[0]
        again = asyncio.ensure_future(first.enter_again())
        await gates.until_begun(1)
        os.kill(gates.workers[0].pid, signal.SIGKILL)
        await lost(gates)
        await gates.until_begun(1)
        await gates.open()
        assert await again == gates.workers[0].pid
        with pytest.raises(sglrl.WorkerLost, match="the state of its object"):
            await first.begun_so_far()
        assert await gates[0].begun_so_far() == 1
