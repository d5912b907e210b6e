"""Tokens and logprobs equal those of Hugging Face transformers, however a request is run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

import sglrl
from sglrl.launching.tiny_model import make_model

from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
PROMPTS = [[3 + (7 * i + 11 * j * j) % 500 for j in range(3 + 9 * i)] for i in range(6)]
CASES = [("qwen3", "float32"), ("llama", "float32"), ("qwen3", "bfloat16")]


class Case:
    def __init__(self, client: sglrl.Client, reference: Reference, dtype: str) -> None:
        self.client = client
        self.reference = reference
        self.dtype = dtype
        self.tolerance = TOLERANCE[dtype]


def flatten(folder: Path) -> None:
    """Make the logits an eighth as large.

    The random model's logits are so large that rounding them to 16 bits, which both sides do, alone
    reaches the tolerance: logits of 4 and more are rounded by 0.03.
    """
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] /= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=CASES, ids="-".join)
async def case(request: pytest.FixtureRequest, models: Path) -> AsyncIterator[Case]:
    architecture, dtype = request.param
    folder = models / f"{architecture}-{dtype}"
    make_model(folder, architecture=architecture, dtype=dtype, seed=1)
    if dtype == "bfloat16":
        flatten(folder)
    async with sglrl.launch(folder, device="cpu") as client:
        yield Case(client, Reference(folder), dtype)


async def test_the_model_is_described(case: Case) -> None:
    info = case.client.info
    config = case.reference.model.config
    assert info.dtype == case.dtype
    assert info.architecture == config.architectures[0]
    assert info.vocab_size == config.vocab_size
    assert info.context_length == config.max_position_embeddings
    assert info.eos_token_ids == [config.eos_token_id]
    assert info.device == "cpu"


async def test_greedy_tokens_and_their_logprobs(case: Case) -> None:
    completions = await case.client.generate(
        input_ids=PROMPTS, max_new_tokens=24, temperature=0, logprobs=True, ignore_eos=True
    )
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.prompt_ids.tolist() == prompt
        assert len(completion.output_ids) == 24
        assert completion.finish_reason == "length"
        expected = case.reference.logprobs([*prompt, *completion.output_ids])[len(prompt) - 1 : -1]
        chosen = expected[np.arange(24), completion.output_ids]
        np.testing.assert_allclose(completion.logprobs, chosen, atol=case.tolerance, rtol=0)
        # In 16 bits two logits may be so close that the order of summation decides.
        slack = 0 if case.dtype == "float32" else 2 * case.tolerance
        assert (chosen >= expected.max(axis=1) - slack).all()
        if case.dtype == "float32":
            assert completion.output_ids.tolist() == case.reference.greedy(prompt, 24)


@pytest.mark.parametrize("lengths", [[2], [16], [17], [3, 5, 8], [9, 1, 1]], ids=str)
async def test_prompts_of_a_few_tokens(case: Case, lengths: list[int]) -> None:
    """SGLang prefills the prompts as a decode step if they have at most 16 tokens together."""
    prompts = [[3 + (5 * i + 7 * j * j) % 500 for j in range(n)] for i, n in enumerate(lengths)]
    assert await case.client.flush_cache()
    for _ in range(2):
        completions = await case.client.generate(
            input_ids=prompts, max_new_tokens=3, logprobs=True, ignore_eos=True
        )
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = case.reference.logprobs_of(prompt, completion.output_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=case.tolerance, rtol=0)
        # All but the added tokens of the next prompts are cached.
        prompts = [
            [*prompt, *range(40, 40 + n % 5)] for prompt, n in zip(prompts, lengths, strict=True)
        ]


async def test_sampled_tokens_logprobs(case: Case) -> None:
    completions = await case.client.generate(
        input_ids=PROMPTS, max_new_tokens=40, logprobs=True, n=2, ignore_eos=True
    )
    for prompt, samples in zip(PROMPTS, completions, strict=True):
        for sample in samples:
            expected = case.reference.logprobs_of(prompt, sample.output_ids)
            np.testing.assert_allclose(sample.logprobs, expected, atol=case.tolerance, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
async def test_logprobs_are_after_temperature(case: Case, temperature: float) -> None:
    (prompt, *_) = PROMPTS
    # Filters change the drawn tokens, but not the reported logprobs.
    completion = await case.client.generate(
        input_ids=prompt, max_new_tokens=20, temperature=temperature, top_p=0.9, logprobs=True
    )
    expected = case.reference.logprobs_of(prompt, completion.output_ids, temperature)
    np.testing.assert_allclose(
        completion.logprobs, expected, atol=case.tolerance / min(1, temperature), rtol=0
    )


async def test_alone_in_a_batch_streamed_and_after_a_cached_prefix(case: Case) -> None:
    client, prompt = case.client, PROMPTS[4]
    wanted = {"max_new_tokens": 20, "temperature": 0, "logprobs": True, "ignore_eos": True}
    assert await client.flush_cache()
    alone = await client.generate(input_ids=prompt, **wanted)
    assert alone.cached_tokens == 0
    cached = await client.generate(input_ids=prompt, **wanted)
    assert cached.cached_tokens > 0
    assert await client.flush_cache()
    others = [client.generate(input_ids=p, **wanted) for p in PROMPTS if p is not prompt]
    batched, *_ = await asyncio.gather(client.generate(input_ids=prompt, **wanted), *others)
    stream = client.stream(input_ids=prompt, **wanted)
    chunks = [chunk async for chunk in stream]
    streamed = stream.completion
    assert len(chunks) > 1
    assert np.concatenate([c.output_ids for c in chunks]).tolist() == streamed.output_ids.tolist()
    assert np.concatenate([c.logprobs for c in chunks]).tolist() == streamed.logprobs.tolist()
    assert "".join(c.text for c in chunks) == streamed.text
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == streamed.finish_reason == "length"
    for other in (cached, batched, streamed):
        np.testing.assert_allclose(other.logprobs[0], alone.logprobs[0], atol=case.tolerance)
        if case.dtype == "float32":
            assert other.output_ids.tolist() == alone.output_ids.tolist()
            np.testing.assert_allclose(other.logprobs, alone.logprobs, atol=case.tolerance)
            assert other.text == alone.text


async def test_scores_equal_generation_and_the_reference(case: Case) -> None:
    client, prompt = case.client, PROMPTS[3]
    made = await client.generate(input_ids=prompt, max_new_tokens=30, logprobs=True)
    ids = [*prompt, *made.output_ids.tolist()]
    scores = await client.score(ids)
    assert scores.dtype == np.float32
    assert scores.shape == (len(ids),)
    assert np.isnan(scores[0])
    expected = case.reference.logprobs(ids)[:-1][np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(scores[1:], expected, atol=case.tolerance, rtol=0)
    np.testing.assert_allclose(
        scores[len(prompt) :], made.logprobs, atol=2 * case.tolerance, rtol=0
    )


@pytest.mark.parametrize("start", [0, 1, 2, 17, 29])
async def test_scores_from_a_position_on(case: Case, start: int) -> None:
    prompt = PROMPTS[3]
    assert len(prompt) == 30
    # Score twice: the second time the prefix is cached.
    for _ in range(2):
        scores = await case.client.score(prompt, start=start)
        assert scores.shape == (30 - start,)
        expected = case.reference.logprobs(prompt)[:-1][np.arange(29), prompt[1:]]
        np.testing.assert_allclose(
            scores[1:] if start == 0 else scores,
            expected[max(0, start - 1) :],
            atol=case.tolerance,
            rtol=0,
        )


async def test_many_scores_in_order(case: Case) -> None:
    several = await case.client.score(PROMPTS)
    assert [len(s) for s in several] == [len(p) for p in PROMPTS]
    for prompt, scores in zip(PROMPTS, several, strict=True):
        np.testing.assert_allclose(
            scores[1:],
            case.reference.logprobs(prompt)[:-1][np.arange(len(prompt) - 1), prompt[1:]],
            atol=case.tolerance,
            rtol=0,
        )


async def test_top_logprobs(case: Case) -> None:
    prompt = PROMPTS[2]
    made = await case.client.generate(
        input_ids=prompt, max_new_tokens=12, top_logprobs=5, ignore_eos=True
    )
    top = made.top_logprobs
    assert top.ids.shape == top.logprobs.shape == (12, 5)
    assert made.logprobs.shape == (12,)
    rows = case.reference.logprobs([*prompt, *made.output_ids])[len(prompt) - 1 : -1]
    expected = np.sort(rows, axis=1)[:, ::-1][:, :5]
    np.testing.assert_allclose(top.logprobs, expected, atol=case.tolerance, rtol=0)
    np.testing.assert_allclose(
        np.take_along_axis(rows, top.ids, axis=1), expected, atol=2 * case.tolerance, rtol=0
    )
