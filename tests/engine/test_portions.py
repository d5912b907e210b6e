"""Requests that arrive together are given to SGLang as its steps can take them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

import sglrl
from sglrl_workers.engine.portions import FEW, first_portion

from .policies import until_idle
from .reference import Reference


@given(
    sizes=st.lists(st.integers(0, 50), min_size=FEW, max_size=3 * FEW),
    command=st.booleans(),
    tokens=st.integers(1, 4000),
)
def test_all_come_in_their_order(sizes: list[int], command: bool, tokens: int) -> None:
    if command:
        sizes.insert(len(sizes) // 2, -1)
    left = list(sizes)
    taken: list[int] = []
    while left:
        count = first_portion(left, tokens)
        assert count
        now, left = left[:count], left[count:]
        if left:
            # Nothing is parted from what it goes with, or waits where a command is.
            assert left[0] > 0
            assert -1 not in left
            # As many as there must be, and no more.
            *_, last = (at for at, size in enumerate(now) if size)
            assert sum(now) >= tokens > sum(now[:last])
        taken += now
    assert taken == sizes


def test_a_few_are_not_parted() -> None:
    assert first_portion([1000] * (FEW - 1), 1) == FEW - 1
    assert first_portion([1000] * FEW, 1) == 1
    assert first_portion([], 1) == 0


async def test_a_burst_beyond_what_a_step_takes(qwen: Path, reference: Reference) -> None:
    """Answers are the reference's; cancelling, pausing and statistics go on meanwhile."""
    prompts = [[3 + (7 * i + 11 * j * j) % 500 for j in range(5 + i % 9)] for i in range(300)]
    async with sglrl.launch(qwen, device="cpu", max_prefill_tokens=64) as client:
        calls = [
            asyncio.ensure_future(
                client.generate(input_ids=prompt, max_new_tokens=3, temperature=0, ignore_eos=True)
            )
            for prompt in prompts
        ]
        await asyncio.sleep(0)
        for call in calls[1::3]:
            call.cancel()
        await client.pause()
        await client.stats()
        await client.resume()
        done = await asyncio.gather(*calls, return_exceptions=True)
        for i, (prompt, made) in enumerate(zip(prompts, done, strict=True)):
            if i % 3 == 1:
                assert isinstance(made, asyncio.CancelledError)
            else:
                assert isinstance(made, sglrl.Completion)
                if i % 10 == 0:
                    assert made.output_ids.tolist() == reference.greedy(prompt, 3)
        await until_idle(client)
        aborted = [
            asyncio.ensure_future(client.generate(input_ids=prompt, max_new_tokens=400))
            for prompt in prompts
        ]
        await asyncio.sleep(0)
        count = await client.abort()
        reasons = [made.finish_reason for made in await asyncio.gather(*aborted)]
        assert reasons.count("abort") == count > 0
        await until_idle(client)
