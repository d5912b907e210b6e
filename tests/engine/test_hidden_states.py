"""Hidden states equal those of transformers, whatever happens to the requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

import sglrl

from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
# More than one report has 64 tokens.
LONG: dict[str, Any] = {"input_ids": PROMPT, "max_new_tokens": 70, "ignore_eos": True}
WANTED: dict[str, Any] = {**LONG, "return_hidden_states": True}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[True, False],
    ids=["normal loop", "overlapping loop"],
)
async def engine(request: pytest.FixtureRequest, qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        qwen,
        device="cpu",
        replicas=2,
        restarts=9,
        enable_return_hidden_states=True,
        disable_overlap_schedule=request.param,
    ) as client:
        yield client


def check(reference: Reference, *completions: sglrl.Completion) -> None:
    for made in completions:
        ids = torch.tensor([[*made.prompt_ids.tolist(), *made.output_ids.tolist()]])
        with torch.inference_mode():
            found = reference.model(input_ids=ids, output_hidden_states=True)
        expected = found.hidden_states[-1][0, len(made.prompt_ids) - 1 : -1].float().numpy()
        assert made.hidden_states.dtype == np.float32
        np.testing.assert_allclose(made.hidden_states, expected, atol=1e-4, rtol=0)


async def test_beside_other_requests(engine: sglrl.Client, reference: Reference) -> None:
    """The second request finds its prompt in the prefix cache, and others want other values."""
    one = engine.generate(**WANTED, worker=0)
    many = engine.generate(**WANTED, worker=0, n=3, temperature=0.7, top_k=9, logprobs=True)
    first, made, plain, scores = await asyncio.gather(
        one, many, engine.generate(**LONG, worker=0), engine.score([*PROMPT, 9], worker=0)
    )
    again = await engine.generate(**{**WANTED, "max_new_tokens": 1}, worker=0)
    assert again.cached_tokens > 0
    check(reference, first, again, *made)
    assert plain.hidden_states is None
    expected = reference.logprobs_of(PROMPT, np.array([9]))
    np.testing.assert_allclose(scores[-1:], expected, atol=1e-4, rtol=0)
    stream = engine.stream(**WANTED)
    chunks = [chunk async for chunk in stream]
    check(reference, stream.completion)
    joined = np.concatenate([chunk.hidden_states for chunk in chunks])
    assert joined.tolist() == stream.completion.hidden_states.tolist()


async def test_after_a_pause_and_an_abort(engine: sglrl.Client, reference: Reference) -> None:
    wanted = {**WANTED, "max_new_tokens": 1500, "worker": 0}
    calls = [asyncio.ensure_future(engine.generate(**wanted)) for _ in range(3)]
    for mode in ("retract", "in_place", "retract"):
        begun = (await engine.stats())[0].engine.kv_tokens
        while (await engine.stats())[0].engine.kv_tokens < begun + 60:
            pass
        await engine.pause(mode)
        await engine.resume()
    await engine.abort()
    made = await asyncio.gather(*calls)
    assert all(one.finish_reason == "abort" and len(one.output_ids) > 30 for one in made)
    check(reference, *made)


async def test_a_worker_is_lost(engine: sglrl.Client, reference: Reference) -> None:
    stream = engine.stream(**{**WANTED, "max_new_tokens": 1500})
    seen = 0
    killed = False
    async for chunk in stream:
        seen += len(chunk.output_ids)
        if seen > 66 and not killed:
            killed = True
            (busy,) = [worker for worker in engine.workers if worker.load]
            os.kill(busy.pid, signal.SIGKILL)
    made = stream.completion
    assert (made.resumed, len(made.resumed_at)) == (1, 1)
    assert made.resumed_at[0] > 66
    check(reference, made)
