"""Distributions of the next token on their way from worker to caller, with the fake engine."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.transport.shared_rows import MAX_BYTES, RowsReader

VOCAB = 50_000
FALLING = -np.arange(VOCAB, dtype=np.float64) - np.log(1 / (1 - np.exp(-1.0)))


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake", engine="fake", replicas=2, vocab_size=VOCAB, context_length=64
    ) as client:
        yield client


async def test_whole_rows_arrive_beside_everything_else(client: sglrl.Client) -> None:
    """Each row, a raw frame, must reach its own call, among answers without raw frames."""

    async def one(i: int) -> None:
        match i % 4:
            case 0:
                made = await client.generate(input_ids=[i], max_new_tokens=3, logprobs=True)
                assert made.output_ids.tolist() == [i] * 3
            case 1:
                top = await client.next_token_logprobs([7, i], top_k=5)
                assert top.token_ids is not None
                assert top.token_ids.tolist() == [i, i + 1, i + 2, i + 3, i + 4]
                np.testing.assert_allclose(top.logprobs, FALLING[:5], rtol=1e-6)
            case _:
                found = await client.next_token_logprobs([7, i])
                assert found.logprobs.shape == (VOCAB,)
                assert found.token_ids is None
                assert not found.logprobs.flags.writeable
                assert int(found.logprobs.argmax()) == i
                np.testing.assert_allclose(np.roll(found.logprobs, -i), FALLING, rtol=1e-6)

    await asyncio.gather(*(one(i) for i in range(200)))
    assert all(worker.load == 0 for worker in client.workers)


async def test_a_lost_worker_is_survived(client: sglrl.Client) -> None:
    first, second = client.workers
    os.kill(first.pid, signal.SIGSTOP)
    calls = [asyncio.ensure_future(client.next_token_logprobs([i])) for i in range(20)]
    done, waiting = await asyncio.wait(calls, timeout=300, return_when=asyncio.FIRST_COMPLETED)
    assert done
    while client.workers[1].load:
        done, waiting = await asyncio.wait(
            waiting, timeout=300, return_when=asyncio.FIRST_COMPLETED
        )
        assert done
    assert client.workers[0].load == len(waiting) > 0
    os.kill(first.pid, signal.SIGKILL)
    for i, found in enumerate(await asyncio.wait_for(asyncio.gather(*calls), 300)):
        assert int(found.logprobs.argmax()) == i
    assert second.id == 1


def readers(client: sglrl.Client) -> list[RowsReader]:
    """Return the readers of the memory that the driver shares with each worker, in worker order."""
    found = client.requests.driver.workers.frames.readers
    return [found[member] for member in sorted(found, key=lambda member: member.index)]


async def test_rows_lie_in_memory_that_is_shared_while_there_is_room() -> None:
    """More rows are held at once than fit into the shared memory: the rest come in messages."""
    vocab = 1 << 18
    room = MAX_BYTES // (4 * vocab)
    falling = -np.arange(vocab, dtype=np.float64) - np.log(1 / (1 - np.exp(-1.0)))
    async with sglrl.launch(
        "fake", engine="fake", vocab_size=vocab, context_length=64, replicas=1
    ) as client:
        (reader,) = readers(client)
        begun = time.monotonic()
        while not reader.held:
            # Rows are shared once the worker knows that the driver has opened the memory.
            assert time.monotonic() - begun < 60
            found = [await client.next_token_logprobs([1])]
        del found
        for _ in range(3):
            # Cancelled calls keep no row.
            calls = [asyncio.ensure_future(client.next_token_logprobs([i])) for i in range(20)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await client.stats()
        assert reader.held == 0
        found = await asyncio.gather(*(client.next_token_logprobs([i]) for i in range(room + 20)))
        assert reader.held == room
        for i, row in enumerate(found):
            assert row.logprobs[i] == np.float32(falling[0])
            assert row.logprobs[(i + 9) % vocab] == np.float32(falling[9])
            assert not row.logprobs.flags.writeable
        # The memory is reused.
        kept = found[7].logprobs[5:9]
        values = kept.tolist()
        del found, row
        # The future that woke this task holds its result until the next turn.
        await asyncio.sleep(0)
        gc.collect()
        assert reader.held == 1
        await asyncio.gather(*(client.next_token_logprobs([3]) for i in range(50)))
        assert kept.tolist() == values
    # The row outlives the pool.
    assert kept.tolist() == values


async def test_rows_of_a_worker_that_was_killed(client: sglrl.Client) -> None:
    for worker in (0, 1):
        await client.next_token_logprobs([1], worker=worker)
    first, _ = readers(client)
    found = [await client.next_token_logprobs([i], worker=0) for i in range(5)]
    assert first.held == 5
    news = asyncio.ensure_future(client.requests.driver.change())
    await asyncio.sleep(0)
    os.kill(client.workers[0].pid, signal.SIGKILL)
    await news
    await client.wait_until_full()
    assert len(readers(client)) == 2
    assert first not in readers(client)
    again = [await client.next_token_logprobs([i + 50], worker=0) for i in range(5)]
    for i in range(5):
        assert int(found[i].logprobs.argmax()) == i
        assert int(again[i].logprobs.argmax()) == i + 50


async def test_a_worker_whose_memory_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver cannot open the memory, for example because the worker is in another container."""

    def refused(*args: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("sglrl.driver.links.RowsReader", refused)
    async with sglrl.launch("fake", engine="fake", vocab_size=VOCAB, context_length=64) as client:
        for i in range(3):
            assert int((await client.next_token_logprobs([i])).logprobs.argmax()) == i
        assert not readers(client)


async def test_clients_in_other_processes_get_rows_too(client: sglrl.Client) -> None:
    async with sglrl.connect(client.address) as remote:
        for i in range(40):
            assert int((await remote.next_token_logprobs([i])).logprobs.argmax()) == i
        found = await asyncio.gather(*(remote.next_token_logprobs([i]) for i in range(100)))
        for i, row in enumerate(found):
            np.testing.assert_allclose(np.roll(row.logprobs, -i), FALLING, rtol=1e-6)
        # Remote clients get copies, so this process frees each row once it was sent.
        begun = time.monotonic()
        while any(reader.held for reader in readers(client)):
            assert time.monotonic() - begun < 60
            await client.stats()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"ids": []}, "empty"),
        ({"ids": [VOCAB]}, "outside"),
        ({"ids": [1] * 64}, "64 tokens.*63"),
        ({"ids": [1], "top_k": 0}, "top_k"),
        ({"ids": [1], "top_k": True}, "top_k"),
        ({"ids": [1], "top_k": VOCAB + 1}, "top_k"),
    ],
)
async def test_what_is_refused(client: sglrl.Client, values: dict[str, Any], says: str) -> None:
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await client.next_token_logprobs(**values)
    with pytest.raises(sglrl.InvalidRequest, match="top_logprobs"):
        await client.score([1], top_logprobs=-1)


async def test_scores_with_the_likeliest_tokens(client: sglrl.Client) -> None:
    plain, top = await asyncio.gather(
        client.score([1, 2, 3], start=1), client.score([1, 2, 3], start=1, top_logprobs=4)
    )
    assert plain.tolist() == top.logprobs.tolist()
    assert top.top_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert top.top_logprobs.shape == (2, 4)
    assert plain.versions == top.versions == ((0, 2, 0),)
    assert plain.version == top.version == 0


def test_without_await() -> None:
    with sglrl.blocking("fake", engine="fake", vocab_size=100) as client:
        assert int(client.next_token_logprobs([1, 2, 17]).logprobs.argmax()) == 17
        assert client.score([1, 2, 17]).version == 0
        assert client.next_token_logprobs([3], top_k=2).token_ids.tolist() == [3, 4]


async def test_a_row_that_is_more_than_a_message_takes() -> None:
    """The caller gets an error, and the worker keeps running."""
    async with sglrl.launch(
        "fake", engine="fake", vocab_size=8192, context_length=64, max_message_bytes=20_000
    ) as client:
        pid = client.workers[0].pid
        for i in range(3):
            with pytest.raises(sglrl.MessageTooLarge, match="32,768 bytes, of at most 20,000"):
                await client.next_token_logprobs([i])
        top = await client.next_token_logprobs([1], top_k=3)
        assert len(top.logprobs) == 3
        assert client.workers[0].pid == pid
