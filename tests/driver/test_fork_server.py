"""A killed or stopped fork server takes its workers along.

A new fork server starts other workers, and no request to the old one is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from actor_classes import Gate, Values
from processes import descendants, strike, wait_for_end

import sglrl
from sglrl.driver import fork_server

from .test_supervision import SLOW, begin, busy, finish, kill, plain_server, states, until

FAULTS = pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kill a stopped fork server after three seconds."""
    monkeypatch.setattr(fork_server, "SILENCE", 3.0)
    yield
    for server in (*fork_server._servers.values(), *fork_server._dead):
        if server.stopped:
            server.process.kill()


@FAULTS
async def test_calls_go_on_at_the_workers_of_another_one(fault: signal.Signals) -> None:
    async with sglrl.launch("fake", engine="fake", replicas=2, **SLOW) as client:
        before = [worker.pid for worker in client.workers]
        server = plain_server()
        calls = begin(client, 20, tokens=2000)
        await busy(client)
        strike(server.process.pid, fault)
        await until(client, ["lost", "lost"])
        assert wait_for_end(before, 10.0) == []
        await finish(calls, tokens=2000)
        await client.wait_until_full()
        assert states(client) == ["ready", "ready"]
        assert plain_server() is not server
        assert set(before).isdisjoint(worker.pid for worker in client.workers)
        await finish(begin(client, 5))


@FAULTS
async def test_actors_come_back(fault: signal.Signals) -> None:
    async with sglrl.spawn(Values, replicas=2) as values, sglrl.spawn(Gate) as gate:
        held = asyncio.ensure_future(gate.enter())
        again = asyncio.ensure_future(gate.enter_again())
        await gate.until_begun(2)
        strike(plain_server().process.pid, fault)
        # A call that a worker has begun is repeated only if it is idempotent.
        with pytest.raises(sglrl.WorkerLost):
            await held
        await gate.wait_until_full()
        await gate.until_begun(1)
        await gate.open()
        assert await again == gate.workers[0].pid
        # The other pool has replaced its workers, too.
        await values.wait_until_full()
        assert await values.add(1) == 11


async def test_a_worker_is_lost_while_the_fork_server_is_stopped() -> None:
    """No process reports the worker's exit before the fork server is killed."""
    async with sglrl.launch("fake", engine="fake", replicas=2, **SLOW) as client:
        calls = begin(client, 10)
        await busy(client)
        strike(plain_server().process.pid, signal.SIGSTOP)
        kill(client, 0)
        await finish(calls)
        await client.wait_until_full()
        await finish(begin(client, 5))


async def test_a_pool_is_started_while_the_fork_server_is_stopped() -> None:
    async with sglrl.spawn(Values) as values:
        stopped = plain_server()
    strike(stopped.process.pid, signal.SIGSTOP)
    async with sglrl.spawn(Values) as values:
        assert await values.add(1) == 11
        assert plain_server() is not stopped


@FAULTS
async def test_a_fork_server_that_imports(fault: signal.Signals) -> None:
    # Other fork servers go on: engines that tests share have come from them.
    for key in [key for key in fork_server._servers if key[0] == "plain"]:
        fork_server._servers.pop(key).close()
    values = sglrl.spawn(Values, start_timeout=5.0 if fault == signal.SIGSTOP else 60.0)
    starting = asyncio.ensure_future(values.__aenter__())
    await asyncio.sleep(0)
    server = plain_server()
    assert not server.warm
    strike(server.process.pid, fault)
    if fault == signal.SIGKILL:
        # Another fork server is started in its place.
        await starting
        assert await values.add(1) == 11
        await values.close()
    else:
        # An import may take as long as ``start_timeout``.
        with pytest.raises(sglrl.WorkerStartError, match="was stopped while it imported"):
            await starting
        assert server.ended(10.0)
        async with sglrl.spawn(Values) as values:
            assert await values.add(1) == 11


class Waits(sglrl.Actor):
    """Reports its start through one FIFO, and waits for a message in another FIFO."""

    def __init__(self, begun: str, go: str) -> None:
        Path(begun).write_text("begun")
        Path(go).read_text()

    @sglrl.endpoint(idempotent=True)
    async def pid(self) -> int:
        return os.getpid()


class Fifos:
    def __init__(self, folder: Path) -> None:
        self.begun, self.go = folder / "begun", folder / "go"
        os.mkfifo(self.begun)
        os.mkfifo(self.go)
        self.arguments = (str(self.begun), str(self.go))

    async def until_begun(self) -> None:
        await asyncio.to_thread(self.begun.read_text)

    async def let_go(self) -> None:
        await asyncio.to_thread(self.go.write_text, "go")


@pytest.fixture
def fifos(tmp_path: Path) -> Fifos:
    return Fifos(tmp_path)


@FAULTS
async def test_the_pool_is_starting(fault: signal.Signals, fifos: Fifos) -> None:
    others = set(descendants())
    starting = asyncio.ensure_future(sglrl.spawn(Waits, *fifos.arguments).__aenter__())
    await fifos.until_begun()
    begun = [pid for pid, name in descendants().items() if name == "sglrl worker"]
    strike(plain_server().process.pid, fault)
    why = "its fork server ended" if fault == signal.SIGKILL else "the fork server did not answer"
    with pytest.raises(sglrl.WorkerStartError, match=f"ended before it was ready: {why}"):
        await starting
    # The kernel ends them a moment after the fork server.
    assert wait_for_end(list(set(begun) - others), 5.0) == []


@FAULTS
async def test_a_replacement_is_starting(fault: signal.Signals, fifos: Fifos) -> None:
    waits = sglrl.spawn(Waits, *fifos.arguments)
    starting = asyncio.ensure_future(waits.__aenter__())
    await fifos.until_begun()
    await fifos.let_go()
    await starting
    await waits.pid()
    kill(waits, 0)
    await fifos.until_begun()
    strike(plain_server().process.pid, fault)
    await fifos.until_begun()
    await fifos.let_go()
    await waits.wait_until_full()
    assert await waits.pid() == waits.workers[0].pid
    await waits.close()


async def test_the_budget_is_used_up() -> None:
    async with sglrl.spawn(Values, restarts=2) as values:
        for _ in range(2):
            await values.add(1)
            strike(plain_server().process.pid, signal.SIGKILL)
            await until(values, ["lost"])
            await values.wait_until_full()
        strike(plain_server().process.pid, signal.SIGKILL)
        await until(values, ["retired"])
        with pytest.raises(sglrl.WorkerLost) as caught:
            await values.add(1)
        assert "lost 3 times: its fork server ended (3 times)" in str(caught.value)
        assert "no more than 2 restarts in 60 s" in str(caught.value)


async def test_there_can_be_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sglrl.spawn(Values, restarts=2) as values:
        await values.add(1)
        monkeypatch.setattr(sys, "executable", "/bin/false")
        strike(plain_server().process.pid, signal.SIGKILL)
        await until(values, ["lost"])
        with pytest.raises(sglrl.WorkerLost) as caught:
            await values.add(1)
        assert "the fork server ended with status 1" in str(caught.value)
        assert "no more than 2 restarts in 60 s" in str(caught.value)
        assert states(values) == ["retired"]


def oom_score_adj(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_the_kernel_prefers_workers_when_memory_runs_out() -> None:
    """The kernel kills workers first, then their fork server, and the driver last.

    The driver's exit would end everything; the fork server's exit ends its workers.
    """
    own = oom_score_adj(os.getpid())
    async with (
        sglrl.launch("fake", engine="fake", replicas=2) as client,
        sglrl.spawn(Values) as values,
    ):
        assert oom_score_adj(plain_server().process.pid) == min(1000, own + 200)
        for worker in (*client.workers, *values.workers):
            assert oom_score_adj(worker.pid) == min(1000, own + 500)
        assert oom_score_adj(os.getpid()) == own


def test_variables_that_imports_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OWN", "1")
    env = {"HF_HOME": "a", "SGLANG_OWN": "2", "TRITON_CACHE_DIR": "b", "NCCL_DEBUG": "INFO"}
    found = fork_server.import_variables("sglang", env)
    assert "NCCL_DEBUG" not in found
    assert {**found, "NCCL_DEBUG": "INFO"}.items() >= env.items()
    assert fork_server.import_variables("plain", env) == {}
