"""Workers that are lost, replaced, added and removed, while every call is answered."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import signal
import struct
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from actor_classes import Gate, Values
from processes import wait_for_end
from readme import DOCS, example

import sglrl
from sglrl.driver import fork_server

IDS = [5, 6, 7]
SLOW = {"tokens_per_step": 1, "step_seconds": 0.002}


def states(pool: sglrl.Client | sglrl.ActorHandle) -> list[str]:
    return [worker.state for worker in pool.workers]


async def until(pool: sglrl.Client | sglrl.ActorHandle, wanted: list[str]) -> None:
    while states(pool) != wanted:
        own = pool.pool if isinstance(pool, sglrl.Client) else pool._pool
        await own.driver.change()


def plain_server() -> fork_server.ForkServer:
    (server,) = [s for s in fork_server._servers.values() if s.preload == "plain"]
    return server


def kill(pool: sglrl.Client | sglrl.ActorHandle, index: int) -> int:
    pid = pool.workers[index].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def begin(
    client: sglrl.Client, count: int, tokens: int = 100
) -> list[asyncio.Task[sglrl.Completion]]:
    return [
        asyncio.ensure_future(client.generate(input_ids=[i], max_new_tokens=tokens))
        for i in range(count)
    ]


async def busy(client: sglrl.Client) -> None:
    """Wait until every serving worker has generated a token."""
    while not all(s.engine.generated_tokens for s in await client.stats()):
        pass


async def finish(calls: list[asyncio.Task[sglrl.Completion]], tokens: int = 100) -> None:
    for i, completion in enumerate(await asyncio.gather(*calls)):
        assert completion.output_ids.tolist() == [i] * tokens


async def test_a_lost_worker_is_replaced() -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2, **SLOW) as client:
        calls = begin(client, 30)
        await busy(client)
        before = kill(client, 1)
        await finish(calls)
        await client.wait_until_full()
        assert states(client) == ["ready", "ready"]
        assert client.workers[1].pid != before
        # The replacement is routed to again, and can be addressed by its index.
        made = await client.generate(input_ids=IDS, max_new_tokens=3, worker=1)
        assert (made.worker, made.output_ids.tolist()) == (1, IDS)
        calls = begin(client, 30)
        assert {c.worker for c in await asyncio.gather(*calls)} == {0, 1}


async def test_calls_of_the_only_worker_wait_for_its_replacement() -> None:
    async with sglrl.launch("fake", engine="fake", **SLOW) as client:
        pinned = asyncio.ensure_future(client.generate(input_ids=[9], max_new_tokens=100, worker=0))
        calls = begin(client, 5)
        await busy(client)
        kill(client, 0)
        await finish(calls)
        assert (await pinned).output_ids.tolist() == [9] * 100
        assert states(client) == ["ready"]


async def test_the_budget_is_used_up() -> None:
    async with sglrl.launch("fake", engine="fake", restarts=1, **SLOW) as client:
        calls = begin(client, 3)
        await busy(client)
        kill(client, 0)
        await finish(calls)
        await client.wait_until_full()
        calls = begin(client, 3, tokens=20_000)
        await busy(client)
        kill(client, 0)
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, sglrl.WorkerLost)
            assert "no worker is left" in str(end)
            assert re.search(r"lost 2 times: killed by SIGKILL.* \(2 times\); ", str(end))
            assert "no more than 1 restart in 60 s" in str(end)
        assert states(client) == ["retired"]
        for ask in (client.generate(input_ids=IDS), client.wait_until_full()):
            with pytest.raises(sglrl.WorkerLost, match="no worker is left"):
                await ask


async def test_the_pool_goes_on_smaller() -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2, restarts=0, **SLOW) as client:
        calls = begin(client, 10)
        await busy(client)
        kill(client, 0)
        await finish(calls)
        await client.wait_until_full()
        assert states(client) == ["retired", "ready"]


class Fragile(sglrl.Actor):
    """An actor whose constructor works only while a file exists."""

    def __init__(self, file: str) -> None:
        if not os.path.exists(file):
            raise FileNotFoundError(file)

    @sglrl.endpoint(idempotent=True)
    async def pid(self) -> int:
        return os.getpid()


async def test_a_replacement_that_cannot_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "here"
    file.touch()
    async with sglrl.spawn(Fragile, str(file), restarts=2) as fragile:
        await fragile.pid()
        file.unlink()
        kill(fragile, 0)
        # A call might otherwise find a broken connection before the driver learns of the exit.
        while states(fragile) == ["ready"]:
            await fragile._pool.driver.change()
        with pytest.raises(sglrl.WorkerLost) as lost:
            await fragile.pid()
        assert "exited with status 1 (2 times); killed by" in str(lost.value)
        assert f"FileNotFoundError: {file}" in str(lost.value)
        assert states(fragile) == ["retired"]
    assert "FileNotFoundError" in caplog.text, "its last output is in the log"


class Brittle(sglrl.Actor):
    """An actor of which a call ends the process."""

    @sglrl.endpoint
    async def leave(self, how: str) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt("the licence has expired")
        if how == "exit":
            try:
                raise ValueError("a handled one")
            except ValueError:
                traceback.print_exc()
            os.kill(os.getpid(), signal.SIGKILL)


async def test_a_loss_names_the_exception() -> None:
    """A signal says nothing about an exception that the worker printed before."""
    async with sglrl.spawn(Brittle, restarts=2) as brittle:
        for how, says in (
            ("interrupt", "exited with status 1: KeyboardInterrupt: the licence has expired"),
            ("exit", "killed by SIGKILL"),
            ("interrupt", "the last error: KeyboardInterrupt: the licence has expired"),
        ):
            # A call might otherwise find a broken connection before the driver learns of the exit.
            call = asyncio.ensure_future(brittle.leave(how))
            with pytest.raises(sglrl.WorkerLost) as caught:
                await call
            assert says in str(caught.value)
            assert "a handled one" not in str(caught.value)
            if states(brittle) != ["retired"]:
                await brittle.wait_until_full()
        with pytest.raises(sglrl.WorkerLost) as caught:
            await brittle.leave("")
        assert "exited with status 1 (2 times); killed by SIGKILL" in str(caught.value)
        assert "KeyboardInterrupt: the licence has expired" in str(caught.value)


async def test_what_a_worker_knew_is_not_taken_for_granted() -> None:
    """Calls that are not idempotent fail at once instead of waiting for a replacement."""
    async with sglrl.spawn(Gate, replicas=2, window=2) as gates:
        calls = [asyncio.ensure_future(gates[0].enter()) for _ in range(4)]
        again = asyncio.ensure_future(gates[0].enter_again())
        # This call is sent after the calls that fill the window.
        await gates[1].begun_so_far()
        kill(gates, 0)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} == {sglrl.WorkerLost}
        await gates[0].until_begun(1)
        await gates[0].open()
        assert await again == gates.workers[0].pid


async def test_workers_are_added_and_removed_under_load() -> None:
    async with sglrl.launch("fake", engine="fake", **SLOW) as client:
        calls = begin(client, 20, tokens=300)
        await busy(client)
        assert await client.add_workers(2) == [1, 2]
        assert states(client) == ["ready"] * 3
        more = begin(client, 20, tokens=300)
        await busy(client)
        removed = asyncio.ensure_future(client.remove_worker(0))
        await asyncio.sleep(0)
        assert states(client) == ["draining", "ready", "ready"]
        with pytest.raises(sglrl.WorkerLost, match="draining"):
            await client.generate(input_ids=IDS, worker=0)
        with pytest.raises(sglrl.UsageError, match="already draining"):
            await client.remove_worker(0)
        await removed
        assert states(client) == ["retired", "ready", "ready"]
        for batch in (calls, more):
            await finish(batch, tokens=300)
            assert not any(call.result().resumed for call in batch), "it was let finish"
        with pytest.raises(sglrl.UsageError, match="no worker 7"):
            await client.remove_worker(7)
        await client.remove_worker(1)
        with pytest.raises(sglrl.UsageError, match="the last one"):
            await client.remove_worker(2)


async def test_what_a_removed_worker_does_not_finish_goes_on_elsewhere() -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2, **SLOW) as client:
        calls = begin(client, 10, tokens=400)
        await busy(client)
        await client.remove_worker(1, timeout=0.01)
        await finish(calls, tokens=400)
        assert any(call.result().resumed for call in calls)


async def test_a_lost_worker_is_removed_before_it_is_replaced() -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2, **SLOW) as client:
        kill(client, 0)
        await until(client, ["lost", "ready"])
        await client.remove_worker(0)
        assert states(client) == ["retired", "ready"]
        await finish(begin(client, 3))


async def test_an_added_worker_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    file = tmp_path / "here"
    file.touch()
    async with sglrl.spawn(Fragile, str(file)) as fragile:
        file.unlink()
        with pytest.raises(sglrl.WorkerStartError) as caught:
            await fragile.add_workers(2)
        assert "FileNotFoundError" in caught.value.output
        assert await fragile.pid() == fragile.workers[0].pid
        assert states(fragile) == ["ready", "retired", "retired"]
        with pytest.raises(sglrl.UsageError, match="n must be"):
            await fragile.add_workers(0)


async def test_close_lets_calls_finish() -> None:
    async with sglrl.launch("fake", engine="fake", window=2, **SLOW) as client:
        calls = begin(client, 6)
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(sglrl.Closed, match="being closed"):
            await client.generate(input_ids=IDS)
        await finish(calls)
        await closing


async def test_close_does_not_wait_for_ever() -> None:
    async with sglrl.launch("fake", engine="fake", context_length=100_000, **SLOW) as client:
        calls = begin(client, 2, tokens=90_000)
        await busy(client)
        await client.close(drain=True, timeout=0.05)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(end) for end in ends} == {sglrl.Closed}


async def test_the_fork_server_is_lost_too() -> None:
    async with sglrl.spawn(Values, replicas=2) as values:
        await values.add(1)
        plain_server().process.kill()
        # The workers die with their fork server; a new fork server starts the replacements.
        await until(values, ["lost", "lost"])
        assert await values.add(1) == 11
        await values.wait_until_full()


async def test_workers_are_added_when_the_fork_server_was_lost() -> None:
    async with sglrl.spawn(Values, restarts=0) as values:
        plain_server().process.kill()
        await until(values, ["retired"])
        assert await values.add_workers() == [1]
        assert await values.add(1) == 11


async def test_an_unreadable_message_ends_its_senders_workers_alone() -> None:
    async with sglrl.spawn(Gate, restarts=0) as gate, sglrl.spawn(Values, restarts=0) as values:
        held = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        connection = values._pool._launcher._connection
        assert connection is not None
        assert connection._transport is not None
        connection._transport.write(struct.pack("<I", 1) + b"\xc1")
        await until(values, ["retired"])
        assert wait_for_end([values.workers[0].pid], 10.0) == []
        await gate.open()
        assert await held == gate.workers[0].pid


@contextmanager
def files_used_up(pid: int) -> Iterator[None]:
    """Limit the process to one more open file; a fork needs four."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = next(number for number in itertools.count() if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_fork_that_fails_harms_no_other_worker() -> None:
    async with sglrl.spawn(Gate, restarts=0) as gate:
        held = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        with (
            files_used_up(plain_server().process.pid),
            pytest.raises(sglrl.WorkerStartError, match=r"could not fork: .*Too many open files"),
        ):
            await gate.add_workers()
        assert states(gate) == ["ready", "retired"]
        await gate.open()
        assert await held == gate.workers[0].pid
        assert await gate.add_workers() == [2]


async def test_waiting_for_a_worker_ends_with_the_pool() -> None:
    async with sglrl.spawn(Values, replicas=2) as values:
        kill(values, 0)
        await until(values, ["lost", "ready"])
        waiting = asyncio.ensure_future(values.wait_until_full())
        await asyncio.sleep(0)
        await values.close()
        with pytest.raises(sglrl.Closed):
            await waiting


async def test_adding_workers_ends_with_the_pool() -> None:
    async with sglrl.spawn(Values) as values:
        adding = asyncio.ensure_future(values.add_workers())
        await asyncio.sleep(0)
        assert states(values) == ["ready", "starting"]
        await values.close()
        with pytest.raises(sglrl.Closed):
            await adding


async def test_adding_workers_that_wait_for_weights_ends_with_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def never(*_: Any) -> bool:
        return await asyncio.Event().wait()

    async with sglrl.spawn(Values) as values:
        monkeypatch.setattr(values._pool.weights, "must_sync", lambda worker: True)
        monkeypatch.setattr(values._pool.weights, "sync", never)
        adding = asyncio.ensure_future(values.add_workers())
        await until(values, ["ready", "syncing"])
        await values.close()
        with pytest.raises(sglrl.Closed):
            await adding


async def test_removing_a_worker_ends_with_the_pool() -> None:
    async with sglrl.spawn(Gate, replicas=2) as gates:
        held = asyncio.ensure_future(gates[0].enter())
        await gates[0].until_begun(1)
        removing = asyncio.ensure_future(gates.remove_worker(0))
        await until(gates, ["draining", "ready"])
        await gates.close()
        for ended in (removing, held):
            with pytest.raises(sglrl.Closed):
                await ended


async def test_a_worker_goes_also_when_nobody_waits_for_it() -> None:
    async with sglrl.spawn(Gate, replicas=2) as gates:
        held = asyncio.ensure_future(gates[0].turn())
        removing = asyncio.ensure_future(gates.remove_worker(0))
        await until(gates, ["draining", "ready"])
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        await held
        await until(gates, ["retired", "ready"])


async def test_a_close_that_is_cancelled_changes_nothing() -> None:
    async with sglrl.spawn(Gate) as gate:
        held = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        closing = asyncio.ensure_future(gate.close(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(sglrl.Closed, match="being closed"):
            await gate.open()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await gate.open()
        assert await held == gate.workers[0].pid


async def test_a_close_that_is_cancelled_leaves_another_one_to_its_end() -> None:
    async with sglrl.spawn(Gate) as gate:
        held = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        one, other = (asyncio.ensure_future(gate.close(drain=True)) for _ in range(2))
        await asyncio.sleep(0)
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        with pytest.raises(sglrl.Closed, match="being closed"):
            await gate.open()
        held.cancel()
        await other
        assert [worker.state for worker in gate.workers] == ["retired"]


async def test_waiting_for_a_worker_that_does_not_come() -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2, **SLOW) as client:
        kill(client, 0)
        await until(client, ["lost", "ready"])
        with pytest.raises(
            sglrl.DeadlineExceeded, match=r"not every worker serves after 0\.001 s: 0"
        ):
            await client.wait_until_full(0.001)


@pytest.mark.parametrize(
    "wrong",
    [
        {"restarts": -1},
        {"restarts": True},
        {"restarts": 1.5},
        {"restart_period": 0},
        {"restart_period": "x"},
    ],
)
def test_wrong_budgets(wrong: dict[str, Any]) -> None:
    with pytest.raises(sglrl.UsageError, match=next(iter(wrong))):
        sglrl.launch("fake", engine="fake", **wrong)
    with pytest.raises(sglrl.UsageError, match=next(iter(wrong))):
        sglrl.spawn(Values, **wrong)


async def test_what_the_documents_show() -> None:
    code = example("add_workers", DOCS / "operations.md")
    space: dict[str, Any] = {
        "model": "fake",
        "sglrl": SimpleNamespace(launch=partial(sglrl.launch, engine="fake")),
    }
    exec("async def shown():\n" + textwrap.indent(code, "    "), space)
    await space["shown"]()


def test_blocking() -> None:
    with sglrl.blocking("fake", engine="fake") as client:
        assert client.add_workers() == [1]
        client.wait_until_full()
        client.remove_worker(0)
        assert [w.state for w in client.workers] == ["retired", "ready"]
        assert client.generate(input_ids=IDS, max_new_tokens=3).worker == 1
        client.close(drain=True)
