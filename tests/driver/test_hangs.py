"""Hanging workers are found, report their stack, and are killed. Slow workers are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actor_classes import Blocks, Gate

import sglrl
from sglrl.core.members import READY
from sglrl.driver.pool import Pool
from sglrl.transport.zmq import ZmqRouter
from sglrl.wire.calls import Cancel
from sglrl.wire.codec import encode
from sglrl.wire.processes import EngineSpec, WorkerSpec
from sglrl_workers.engine.fake import FakeEngine
from sglrl_workers.mailbox import Mailbox

pytestmark = pytest.mark.alone

IDS = [3, 1, 4, 1, 5]
WANTED: dict[str, Any] = {"input_ids": IDS, "max_new_tokens": 40}
ANSWER = (IDS * 8)[:40]

HANG_TIMEOUT = 1.0
STEP = 0.01


@pytest.fixture
def hang_file(tmp_path: Path) -> Path:
    return tmp_path / "hang"


@pytest.fixture
async def pair(hang_file: Path) -> AsyncIterator[sglrl.Client]:
    """Two workers. The second gets calls only when the first takes none."""
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        tokens_per_step=1,
        step_seconds=STEP,
        hang_file=str(hang_file),
        hang_timeout=HANG_TIMEOUT,
        restarts=0,
    ) as client:
        fabric = client.requests.driver.fabric
        fabric.router.chain[:] = [
            lambda call: next(
                (m for m in fabric.members.values() if m.state is READY and m.has_room), None
            )
        ]
        yield client


def hang(file: Path) -> None:
    """Make the next engine that runs a step hang."""
    file.touch()


def end_quickly(pool: Pool) -> None:
    """Shorten the shutdown timeout, for workers that cannot exit by themselves."""
    pool._config = msgspec.structs.replace(pool._config, shutdown_timeout=0.2)


def hangs_reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if " hangs: " in r.getMessage()]


async def test_an_engine_that_hangs_is_replaced_by_another(
    pair: sglrl.Client, hang_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = pair.stream(**WANTED)
    calls = [asyncio.ensure_future(pair.generate(**WANTED)) for _ in range(5)]
    ids: list[int] = []
    async for chunk in stream:
        ids += chunk.output_ids.tolist()
        if len(ids) == 3:
            hang(hang_file)
    assert ids == ANSWER
    for made in [stream.completion, *await asyncio.gather(*calls)]:
        assert made.output_ids.tolist() == ANSWER
        assert (made.worker, made.resumed) == (1, 1)
    (report,) = hangs_reported(caplog)
    assert "worker 0 hangs: no progress for " in report
    assert "with 6 calls pending" in report
    # The report has the stack of the hanging thread, and of the other thread.
    assert "fake.py" in report
    assert "_hang_if_told" in report
    assert "_send_heartbeats" in report
    assert [worker.state for worker in pair.workers] == ["retired", "ready"]


async def test_a_replacement_is_watched_too(
    hang_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sglrl.launch(
        "fake", engine="fake", hang_file=str(hang_file), hang_timeout=HANG_TIMEOUT
    ) as client:
        first = client.workers[0].pid
        for _ in range(2):
            hang(hang_file)
            made = await client.generate(**WANTED)
            assert made.output_ids.tolist() == ANSWER
        assert client.workers[0].pid != first
    assert len(hangs_reported(caplog)) == 2


async def test_a_stopped_worker_is_found_when_a_call_is_there(
    pair: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    os.kill(pair.workers[0].pid, signal.SIGSTOP)
    # Worker 1 works for longer than the silence that is allowed to worker 0.
    long = await pair.generate(input_ids=IDS, max_new_tokens=int(2 * HANG_TIMEOUT / STEP), worker=1)
    assert len(long.output_ids) == 2 * HANG_TIMEOUT / STEP
    assert [worker.state for worker in pair.workers] == ["ready", "ready"]
    made = await pair.generate(**WANTED)
    assert made.output_ids.tolist() == ANSWER
    # The lost call had no tokens yet, so there was nothing to resume.
    assert made.worker == 1
    (report,) = hangs_reported(caplog)
    assert "worker 0 hangs: no heartbeat for " in report
    assert "(no process of it wrote any)" in report


async def test_a_stopped_worker_ends_a_call_that_is_only_for_it(pair: sglrl.Client) -> None:
    os.kill(pair.workers[0].pid, signal.SIGSTOP)
    with pytest.raises(sglrl.WorkerLost, match=r"no heartbeat for .* with 1 call pending"):
        await pair.generate(**WANTED, worker=0, timeout=300)


async def test_a_worker_that_goes_on_in_time_is_left_alone(pair: sglrl.Client) -> None:
    stream = pair.stream(input_ids=IDS, max_new_tokens=int(3 * HANG_TIMEOUT / STEP))
    loop = asyncio.get_running_loop()
    pid = pair.workers[0].pid
    count = 0
    async for chunk in stream:
        if count == 0:
            os.kill(pid, signal.SIGSTOP)
            loop.call_later(HANG_TIMEOUT / 4, os.kill, pid, signal.SIGCONT)
        count += len(chunk.output_ids)
    assert count == 3 * HANG_TIMEOUT / STEP
    assert stream.completion.worker == 0
    assert stream.completion.resumed == 0


async def test_calls_that_got_lost_are_found(
    pair: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is healthy and idle, because a call that the driver sent never arrived."""
    transport = pair.pool.driver.transport
    send = transport.send

    def lose(peer: bytes, frames: Sequence[bytes]) -> bool:
        transport.send = send  # type: ignore[method-assign]
        return True

    transport.send = lose  # type: ignore[method-assign]
    made = await pair.generate(**WANTED)
    assert made.output_ids.tolist() == ANSWER
    assert made.worker == 1
    (report,) = hangs_reported(caplog)
    assert "worker 0 hangs: no progress for" in report


async def test_to_wait_in_vain_is_no_progress(tmp_path: Path) -> None:
    """A loop that only waits reports no progress.

    In a pool this shows only with an engine that waits for longer than its driver's time limit.
    """
    router = ZmqRouter(f"ipc://{tmp_path}/router", max_message_bytes=1 << 20)
    spec = EngineSpec(
        engine="fake",
        model="",
        args={},
        device="cpu",
        rank=0,
        tp_size=1,
        gpu_id=0,
        rendezvous="",
        threads=1,
        memory_share=1.0,
        window=1,
    )
    mailbox = Mailbox(
        WorkerSpec(
            index=0,
            identity=b"worker",
            address=router.address,
            max_message_bytes=1 << 20,
            body=spec,
        )
    )
    engine = FakeEngine(spec)
    heard = asyncio.Event()
    router.start(lambda identity, frames: heard.set())
    mailbox.starting("")
    await heard.wait()

    mailbox.receive(engine)
    mailbox.receive(engine)
    turns = mailbox.progress
    assert turns == 2
    for _ in range(3):
        mailbox.wait(0.001)
        assert not mailbox.receive(engine)
    assert mailbox.progress == turns
    router.send(b"worker", [encode(Cancel([1]))])
    mailbox.wait(60.0)
    assert mailbox.receive(engine)
    assert mailbox.progress == turns + 1
    mailbox.receive(engine)
    assert mailbox.progress == turns + 2
    mailbox.close()
    router.close()


async def test_an_actor_that_blocks_its_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with sglrl.spawn(Blocks, hang_timeout=HANG_TIMEOUT, restarts=0) as actor:
        waiting = asyncio.ensure_future(actor.wait())
        with pytest.raises(sglrl.WorkerLost, match=r"no progress for .* with 2 calls pending"):
            await actor.block()
        with pytest.raises(sglrl.WorkerLost):
            await waiting
    (report,) = hangs_reported(caplog)
    assert "actor_classes.py" in report
    assert " in block" in report
    # Output from before the hang is not part of the report.
    assert "about to block" not in report


async def test_an_actor_that_waits_is_left_alone() -> None:
    async with (
        sglrl.spawn(Gate, hang_timeout=1.0) as gate,
        sglrl.spawn(Blocks, hang_timeout=3.0, restarts=0) as other,
    ):
        waiting = asyncio.ensure_future(gate.enter())
        await gate.until_begun(1)
        # The other actor's loss shows that more time has passed than the first actor's hang
        # timeout.
        with pytest.raises(sglrl.WorkerLost):
            await other.block()
        assert not waiting.done()
        await gate.open()
        assert await waiting == gate.workers[0].pid


async def test_actors_are_not_watched_unless_asked_for() -> None:
    async with sglrl.spawn(Gate) as gate:
        monitor = gate._pool._supervisor.monitor
        assert monitor.heartbeat_interval is None
        assert monitor._timer is None


async def test_closing_while_a_hang_is_dealt_with(pair: sglrl.Client, hang_file: Path) -> None:
    end_quickly(pair.pool)
    hang(hang_file)
    call = asyncio.ensure_future(pair.generate(**WANTED))
    monitor = pair.pool._supervisor.monitor
    found = asyncio.Event()
    dump = monitor._dump

    def dumped(index: int) -> tuple[Path, int]:
        found.set()
        return dump(index)

    monitor._dump = dumped
    await found.wait()
    await pair.close()
    with pytest.raises(sglrl.Closed):
        await call


async def test_beats_of_strangers_are_dropped(pair: sglrl.Client) -> None:
    monitor = pair.pool._supervisor.monitor
    driver = pair.pool.driver
    (known, _) = monitor._workers
    before = driver.dropped.count
    for identity, frame in (
        (b"who/heartbeat", b"\x93\x32\x01\xa0"),
        (known, b"\xc1"),
        (known, b""),
    ):
        driver._on_message(identity, [frame])
    driver._on_message(known, [])
    assert driver.dropped.count == before + 4


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1", True])
def test_no_timeout(timeout: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="hang_timeout"):
        sglrl.launch("fake", engine="fake", hang_timeout=timeout)
    with pytest.raises(sglrl.UsageError, match="hang_timeout"):
        sglrl.spawn(Gate, hang_timeout=timeout)
