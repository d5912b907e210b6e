"""Limits of one client's waiting calls. No client has to wait for all calls of another client."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import sglrl
from sglrl.remote.forwarding import Peer

IDS = [3, 1, 4, 1, 5]
PROGRAM = Path(__file__).with_name("unread_program.py")
VOCAB = 1 << 17
MIB = 1 << 20


def peers(pool: sglrl.Client) -> list[Peer]:
    assert pool._server is not None
    return [*pool._server._peers.values()]


async def until(pool: sglrl.Client, met: Callable[[], bool]) -> None:
    """Make round trips to a worker until the condition is met."""
    async with asyncio.timeout(300):
        while not met():
            await pool.generate(input_ids=IDS, max_new_tokens=1)


async def test_no_client_waits_for_all_calls_of_another() -> None:
    async with (
        sglrl.launch("fake", engine="fake", window=2, step_seconds=0.002) as pool,
        sglrl.connect(pool.address) as busy,
        sglrl.connect(pool.address) as other,
    ):
        many = [
            asyncio.ensure_future(busy.generate(input_ids=IDS, max_new_tokens=1))
            for _ in range(5000)
        ]
        await until(pool, lambda: pool.queue.calls > 4000)
        assert pool.queue.clients == 1
        before = sum(call.done() for call in many)
        await other.generate(input_ids=IDS, max_new_tokens=1)
        await pool.generate(input_ids=IDS, max_new_tokens=1)
        assert sum(call.done() for call in many) - before < 500, "a few in each turn of the loop"
        for call in many:
            call.cancel()
        await asyncio.wait(many)


async def test_a_client_with_too_many_calls_is_refused_alone() -> None:
    async with (
        sglrl.launch(
            "fake", engine="fake", window=1, max_calls_per_client=2, step_seconds=0.02
        ) as pool,
        sglrl.connect(pool.address) as busy,
        sglrl.connect(pool.address) as other,
    ):
        made = await asyncio.gather(
            *(busy.generate(input_ids=IDS, max_new_tokens=9) for _ in range(9)),
            *(other.generate(input_ids=IDS, max_new_tokens=9) for _ in range(2)),
            *(pool.generate(input_ids=IDS, max_new_tokens=9) for _ in range(2)),
            return_exceptions=True,
        )
        refused = [one for one in made[:9] if isinstance(one, sglrl.Overloaded)]
        assert len(refused) >= 6
        assert "(max_calls_per_client=2)" in str(refused[0])
        assert all(isinstance(one, sglrl.Completion) for one in made[9:])


@pytest.mark.parametrize("remote", [False, True])
async def test_calls_with_too_many_bytes_are_refused(remote: bool) -> None:
    prompt = [1] * 30_000
    async with (
        sglrl.launch(
            "fake",
            engine="fake",
            window=1,
            max_queue_bytes=MIB,
            step_seconds=0.02,
            context_length=40_000,
        ) as pool,
        sglrl.connect(pool.address) as other,
    ):
        client = other if remote else pool
        calls = [
            asyncio.ensure_future(client.generate(input_ids=prompt, max_new_tokens=1))
            for _ in range(20)
        ]
        made = await asyncio.gather(*calls, return_exceptions=True)
        refused = [one for one in made if isinstance(one, sglrl.Overloaded)]
        # Eight prompts fit into the queue, and one is running.
        assert len(refused) == 20 - 9
        assert "of at most 1,048,576 (max_queue_bytes)" in str(refused[0])
        assert pool.queue == sglrl.QueueInfo(calls=0, bytes=0, clients=0)


async def test_a_client_knows_how_much_waits() -> None:
    async with (
        sglrl.launch("fake", engine="fake", window=1, step_seconds=0.02) as pool,
        sglrl.connect(pool.address) as other,
    ):
        calls = [
            asyncio.ensure_future(pool.generate(input_ids=IDS, max_new_tokens=9)) for _ in range(9)
        ]
        while not other.queue.calls:
            await other.generate(input_ids=IDS, max_new_tokens=1)
        assert other.queue.clients >= 1
        assert other.queue.bytes >= 20
        await asyncio.gather(*calls)


async def start(address: str, what: str) -> asyncio.subprocess.Process:
    """Start a client in another process, and stop it with SIGSTOP when the pool has its calls."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(PROGRAM), address, what, stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    assert await program.stdout.readline() == b"begun\n"
    program.send_signal(signal.SIGSTOP)
    return program


async def go_on(program: asyncio.subprocess.Process) -> str:
    """Continue the client, and return its last output."""
    program.send_signal(signal.SIGCONT)
    out, _ = await program.communicate()
    return out.decode().strip()


async def end(program: asyncio.subprocess.Process) -> None:
    if program.returncode is None:
        program.kill()
        await program.wait()


async def test_a_client_that_does_not_read_fills_no_memory() -> None:
    """A stopped client has requested 2,000 rows of the vocabulary, which are one gigabyte."""
    async with sglrl.launch(
        "fake", engine="fake", vocab_size=VOCAB, step_seconds=0.0, max_unread_bytes=64 * MIB
    ) as pool:
        before = psutil.Process().memory_info().rss
        program = await start(pool.address, "rows")
        try:
            # Wait until the workers compute nothing more for the stopped client.
            await until(pool, lambda: not any(worker.load for worker in pool.workers))
            grown = psutil.Process().memory_info().rss - before
            assert grown < 400 * MIB, f"{grown / MIB:.0f} MiB"
            assert pool.queue.calls > 1000
            assert len((await pool.next_token_logprobs(IDS)).logprobs) == VOCAB
            assert await go_on(program) == "2000 rows"
        finally:
            await end(program)
        await until(pool, lambda: not peers(pool))
        assert pool.queue == sglrl.QueueInfo(calls=0, bytes=0, clients=0)


async def test_a_client_that_leaves_far_too_much_unread_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The calls run before the limit of unread bytes is reached. Their answers are 80 MB."""
    async with sglrl.launch(
        "fake",
        engine="fake",
        max_unread_bytes=4 * MIB,
        max_message_bytes=4 * MIB,
        tokens_per_step=100,
        step_seconds=0.001,
        context_length=200_000,
    ) as pool:
        program = await start(pool.address, "tokens")
        try:
            await until(pool, lambda: not peers(pool))
            assert "reads too slowly" in caplog.text
            await until(pool, lambda: not any(worker.load for worker in pool.workers))
            assert await go_on(program) == "Closed"
        finally:
            await end(program)
