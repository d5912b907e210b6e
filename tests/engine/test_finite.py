"""Requests for which no token can be drawn fail, and other requests in the batch succeed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file

import sglrl

from .policies import collect, until_running
from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPTS = [[3 + (5 * i + 13 * j * j) % 500 for j in range(2 + 17 * i)] for i in range(12)]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "seeded": {"seed": 5},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 5, "seed": 5},
    "min-p": {"min_p": 0.1},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "logprobs": {"logprobs": True},
}
NOWHERE: dict[str, tuple[int, dict[str, Any]]] = {
    "at once": (0, {"ebnf": 'root ::= root "a"'}),
    "behind ab": (2, {"ebnf": 'root ::= "a" "b" rest\nrest ::= rest "c"'}),
    "too early an end": (1, {"regex": "[ab]", "min_new_tokens": 5}),
    "stop tokens only": (0, {"stop_token_ids": [*range(512)], "min_new_tokens": 5}),
}
"""Sampling options that allow no next token, and the number of output tokens before that."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[True, False], ids=["normal", "overlap"]
)
async def engine(request: pytest.FixtureRequest, qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        qwen, device="cpu", disable_overlap_schedule=request.param, restarts=0, timeout=300
    ) as client:
        yield client


async def check(client: sglrl.Client, reference: Reference) -> None:
    """Check that all answers equal the reference's, in a batch of requests of many lengths."""
    made = await client.generate(input_ids=PROMPTS, max_new_tokens=12, logprobs=True, temperature=0)
    for prompt, one in zip(PROMPTS, made, strict=True):
        expected = reference.logprobs_of(prompt, one.output_ids)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4, rtol=0)
        n = len(one.output_ids)
        assert one.output_ids.tolist() == reference.greedy(prompt, 12)[:n]


@pytest.mark.parametrize("what", NOWHERE)
async def test_requests_that_allow_nothing(
    engine: sglrl.Client, reference: Reference, what: str
) -> None:
    """All ways of sampling share the same batches with requests that succeed."""
    others = asyncio.ensure_future(check(engine, reference))
    count, impossible = NOWHERE[what]
    says = f"no token is allowed after the {count} generated tokens"

    async def streamed(sampling: dict[str, Any]) -> None:
        text = ""
        with pytest.raises(sglrl.InvalidRequest, match=says):
            async for chunk in engine.stream(input_ids=PROMPTS[1], **sampling):
                text += chunk.text
        assert len(text) <= count

    async def fails(sampling: dict[str, Any]) -> None:
        calls = [engine.generate(input_ids=prompt, **sampling) for prompt in PROMPTS[:5]]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, sglrl.InvalidRequest)
            assert says in str(error)
        await streamed(sampling)

    ways = [{"max_new_tokens": 9, **impossible, **way} for way in WAYS.values()]
    await asyncio.gather(*map(fails, ways))
    await others


@pytest.mark.parametrize("value", ["nan", "inf"])
async def test_models_that_have_diverged(
    engine: sglrl.Client, reference: Reference, value: str
) -> None:
    """Every request fails with an error, and the next weights are served normally."""
    good = load_file(reference.folder / "model.safetensors")
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad["model.layers.1.mlp.up_proj.weight"][0, 0] = float(value)
    pid = engine.workers[0].pid
    running = [
        asyncio.ensure_future(
            engine.generate(input_ids=p, max_new_tokens=1900, ignore_eos=True, **way)
        )
        for p, way in zip(PROMPTS, WAYS.values(), strict=False)
    ]
    stream = engine.stream(input_ids=PROMPTS[3], max_new_tokens=1900, ignore_eos=True)
    running.append(asyncio.ensure_future(collect(stream)))
    await until_running(engine, len(running))
    report = await engine.update_weights(bad, check_finite=False)
    says = rf"not finite .* version {report.version}\)"
    calls = [
        *(engine.generate(input_ids=PROMPTS[:5], max_new_tokens=9, **w) for w in WAYS.values()),
        engine.score(PROMPTS[4]),
        engine.score(PROMPTS[4], start=20, top_logprobs=2),
        engine.next_token_logprobs(PROMPTS[4]),
        engine.next_token_logprobs(PROMPTS[5], 3),
    ]
    for error in await asyncio.gather(*running, *calls, return_exceptions=True):
        assert isinstance(error, sglrl.EngineError), error
        assert re.search(says, str(error))
    await engine.update_weights(good)
    await check(engine, reference)
    assert engine.workers[0].pid == pid
