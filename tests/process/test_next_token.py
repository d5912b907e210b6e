"""Distributions of the next token on their way from worker to caller, with the fake engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import sglrl

VOCAB = 50_000
FALLING = -np.arange(VOCAB, dtype=np.float64) - np.log(1 / (1 - np.exp(-1.0)))


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake", engine="fake", replicas=2, vocab_size=VOCAB, context_length=64
    ) as client:
        yield client


async def test_whole_rows_arrive_beside_everything_else(client: sglrl.Client) -> None:
    """Rows are raw frames: each must find its own call, among answers that have none."""

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
    done, waiting = await asyncio.wait(calls, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    assert done
    while client.workers[1].load:
        done, waiting = await asyncio.wait(waiting, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert done
    assert client.workers[0].load == len(waiting) > 0
    os.kill(first.pid, signal.SIGKILL)
    for i, found in enumerate(await asyncio.wait_for(asyncio.gather(*calls), 60)):
        assert int(found.logprobs.argmax()) == i
    assert second.id == 1


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


def test_without_await() -> None:
    with sglrl.blocking("fake", engine="fake", vocab_size=100) as client:
        assert int(client.next_token_logprobs([1, 2, 17]).logprobs.argmax()) == 17
        assert client.next_token_logprobs([3], top_k=2).token_ids.tolist() == [3, 4]
