"""Concurrent prompts with a shared prefix compute it once and give the same results as alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import sglrl

from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

KINDS = {
    "normal": {"disable_overlap_schedule": True},
    "overlap": {"disable_overlap_schedule": False},
    "in-parts": {"disable_overlap_schedule": False, "chunked_prefill_size": 64},
    "mixed": {"enable_mixed_chunk": True, "chunked_prefill_size": 256},
    "priorities": {"enable_priority_scheduling": True},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=KINDS.values(), ids=KINDS)
async def engine(qwen: Path, request: pytest.FixtureRequest) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(qwen, device="cpu", timeout=300, **request.param) as client:
        yield client


def draw(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(200) for _ in range(count)]


async def test_samples_of_a_prompt_compute_it_once(
    engine: sglrl.Client, reference: Reference
) -> None:
    await engine.flush_cache()
    ids = draw(1, 400)
    found = await engine.generate(
        input_ids=ids, n=8, temperature=0.0, max_new_tokens=6, logprobs=True, ignore_eos=True
    )
    cached = sorted(completion.cached_tokens for completion in found)
    assert cached[0] == 0
    assert cached[1] >= 384, "all but what is left of the last part"
    for completion in found:
        assert completion.logprobs is not None
        wanted = reference.logprobs_of(ids, completion.output_ids)
        assert abs(completion.logprobs - wanted).max() < 1e-4
        assert completion.output_ids.tolist() == found[0].output_ids.tolist()


async def test_what_many_prompts_begin_with_is_computed_once(engine: sglrl.Client) -> None:
    await engine.flush_cache()
    system = draw(2, 320)
    for questions in (range(10, 20), range(20, 30)):
        found = await engine.generate(
            input_ids=[system + draw(n, 30) for n in questions], max_new_tokens=4
        )
        cached = sorted(completion.cached_tokens for completion in found)
        assert cached[1] >= 320
    assert cached[0] >= 320, "the second time, of all"


async def test_who_is_waited_for_may_be_cancelled(engine: sglrl.Client) -> None:
    for seed in range(3, 9):
        ids = draw(seed, 500)
        tasks = [
            asyncio.create_task(engine.generate(input_ids=ids, max_new_tokens=4)) for _ in range(6)
        ]
        await asyncio.sleep(0)
        tasks[seed % 3].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(one, asyncio.CancelledError) for one in found].count(True) == 1
        assert sum(isinstance(one, sglrl.Completion) for one in found) == 5


async def test_scores_of_one_text_wait_for_nobody(
    engine: sglrl.Client, reference: Reference
) -> None:
    """Each prompt's logprobs are computed, because the cache does not hold them."""
    ids = draw(9, 200)
    found = await asyncio.gather(*(engine.score(ids) for _ in range(4)))
    wanted = reference.logprobs_of(ids[:1], np.array(ids[1:]))
    for scores in found:
        assert abs(scores[1:] - wanted).max() < 1e-4
