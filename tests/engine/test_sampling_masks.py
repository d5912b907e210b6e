"""Sampling masks and the distributions of logprobs equal what transformers' logits give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

import sglrl
from sglrl.rl import apply_sampling_mask, token_logprobs
from sglrl.sessions.tensors import stack

from .programs import run_program
from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TOLERANCE = 1e-4
MARGIN = 5e-5
"""Tokens this near a limit may be on either side of it: a sum of 512 probabilities in float32 is
rounded by up to 512 / 2**24 = 3e-5, and the logits differ by 1e-5."""
LIMITS: list[dict[str, float]] = [
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.6},
    {"min_p": 0.15},
    {"top_k": 20, "top_p": 0.5},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "top_p": 0.7, "min_p": 0.02},
]
GIVEN = [444, 0, 7, 300, 7]
# More than one report has 64 tokens.
LONG: dict[str, Any] = {"max_new_tokens": 70, "logprobs": True, "ignore_eos": True}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[False, True],
    ids=["normal loop", "overlapping loop"],
)
async def engine(request: pytest.FixtureRequest, qwen: Path) -> AsyncIterator[sglrl.Client]:
    """An engine without accelerations in SGLang's normal loop, and one with all in the other."""
    async with sglrl.launch(
        qwen,
        device="cpu",
        accelerations=request.param,
        disable_overlap_schedule=not request.param,
        constrained_json_disable_any_whitespace=True,
    ) as client:
        yield client


def logits_of(reference: Reference, made: sglrl.Completion) -> np.ndarray:
    """Return float64 [t, vocabulary]: the logits of each output token."""
    ids = [*made.prompt_ids, *made.output_ids]
    rows = reference.logits(ids).numpy().astype(np.float64)
    return rows[len(made.prompt_ids) - 1 : -1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    highest = logits.max(axis=-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))


def allowed(logprobs: np.ndarray, how: dict[str, Any], margin: float) -> set[int]:
    """Return the tokens within all limits, which refer to the whole distribution.

    Args:
        margin: widen the limits by it.
    """
    order = np.argsort(-logprobs, kind="stable")
    probs = np.exp(logprobs[order])
    before = probs.cumsum() - probs
    # Tokens as likely as the last one may take its place, here and below.
    least = probs[before <= how.get("top_p", 1.0) + margin][-1]
    keep = probs >= least - margin
    keep &= probs >= how.get("min_p", 0.0) * probs[0] - margin
    top_k = int(how.get("top_k", len(probs)))
    keep &= probs >= probs[top_k - 1] - margin
    return set(order[keep].tolist())


def check(
    made: sglrl.Completion, logits: np.ndarray, how: dict[str, Any], mode: str = "", top: int = 0
) -> None:
    """Compare the mask and the logprobs of an output with the (processed) logits."""
    temperature = how.get("temperature", 1.0)
    mask = made.sampling_mask
    assert mask is not None
    assert mask.ids.dtype == np.int32
    assert mask.offsets.dtype == np.int64
    assert len(mask.sets()) == len(made.output_ids) == len(logits)
    for i, (ids, token) in enumerate(zip(mask.sets(), made.output_ids.tolist(), strict=True)):
        row = logits[i] / (temperature or 1)
        scaled = log_softmax(row)
        found = set(ids.tolist())
        assert sorted(found) == ids.tolist()
        assert token in found
        if temperature == 0:
            assert found == {token}
        else:
            assert allowed(scaled, how, -MARGIN) <= found <= allowed(scaled, how, MARGIN), i
            assert len(found) <= how.get("top_k", len(row))
        expected = scaled
        if mode == "processed_logprobs":
            # This is what a trainer does with the mask.
            expected = np.full(len(row), -np.inf)
            expected[ids] = log_softmax(row[ids])
        if made.logprobs is not None:
            assert abs(made.logprobs[i] - expected[token]) < TOLERANCE / min(1, temperature or 1)
        expected[np.isneginf(expected)] = np.finfo(np.float32).min
        if made.token_ids_logprobs is not None:
            values = made.token_ids_logprobs[i]
            np.testing.assert_allclose(values, expected[GIVEN], atol=2 * TOLERANCE, rtol=0)
        if top:
            best = np.sort(expected)[::-1][:top]
            values = made.top_logprobs.logprobs[i]
            np.testing.assert_allclose(values, best, atol=2 * TOLERANCE, rtol=0)


@pytest.mark.parametrize("mode", ["scaled_logprobs", "processed_logprobs"])
async def test_limits(engine: sglrl.Client, reference: Reference, mode: str) -> None:
    """All requests run in one batch, beside others without limits, masks or logprobs."""
    cases: list[dict[str, Any]] = [
        {**limits, **more}
        for limits in LIMITS
        for more in ({}, {"temperature": 0.6, "seed": 3}, {"temperature": 1.6})
    ]
    cases += [{"temperature": 0}, {"temperature": 0, "top_p": 0.5}]
    others = [{}, {"logprobs": False}, {"top_p": 0.5, "seed": 7}, {"temperature": 0}]
    calls = [
        engine.generate(
            input_ids=PROMPT,
            **LONG,
            **how,
            logprobs_mode=mode,
            return_sampling_mask=True,
            top_logprobs=4 if i % 3 == 0 else 0,
            token_ids_logprob=GIVEN if i % 2 == 0 else None,
        )
        for i, how in enumerate(cases)
    ]
    plain = [engine.generate(input_ids=PROMPT, **{**LONG, **how}) for how in others]
    *made, scores, given = await asyncio.gather(
        *calls,
        *plain,
        engine.score([*PROMPT, *GIVEN]),
        engine.generate(input_ids=PROMPT, max_new_tokens=3, token_ids_logprob=GIVEN),
    )
    expected = reference.logprobs_of(PROMPT, np.array(GIVEN))
    np.testing.assert_allclose(scores[len(PROMPT) :], expected, atol=TOLERANCE, rtol=0)
    rows = log_softmax(logits_of(reference, given))[:, GIVEN]
    assert (given.logprobs, given.token_ids_logprobs.dtype) == (None, np.float32)
    np.testing.assert_allclose(given.token_ids_logprobs, rows, atol=TOLERANCE, rtol=0)
    for i, (completion, how) in enumerate(zip(made, cases, strict=False)):
        logits = logits_of(reference, completion)
        assert (completion.token_ids_logprobs is None) == (i % 2 == 1)
        check(completion, logits, how, mode, top=4 if i % 3 == 0 else 0)
    for completion, how in zip(made[len(cases) :], others, strict=True):
        assert completion.sampling_mask is None
        if how.get("logprobs", True):
            expected = reference.logprobs_of(PROMPT, completion.output_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)
    # The draws of a seed are those without a mask.
    for i, how in enumerate(cases):
        if "seed" in how:
            again = await engine.generate(input_ids=PROMPT, **LONG, **how)
            assert again.output_ids.tolist() == made[i].output_ids.tolist()
            break


async def test_greedy_alone(engine: sglrl.Client, reference: Reference) -> None:
    made = await engine.generate(
        input_ids=PROMPT,
        **LONG,
        temperature=0,
        top_logprobs=2,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=True,
        token_ids_logprob=GIVEN,
    )
    assert made.output_ids.tolist() == reference.greedy(PROMPT, 70)
    assert made.sampling_mask.ids.tolist() == made.output_ids.tolist()
    assert made.logprobs.tolist() == [0.0] * 70
    assert made.top_logprobs.ids[:, 0].tolist() == made.output_ids.tolist()
    least = float(np.finfo(np.float32).min)
    assert made.top_logprobs.logprobs.tolist() == [[0.0, least]] * 70
    drawn = made.output_ids[:, None] == GIVEN
    assert made.token_ids_logprobs.tolist() == np.where(drawn, 0.0, least).tolist()


async def test_draws_are_distributed_as_the_processed_logprobs(
    engine: sglrl.Client, reference: Reference
) -> None:
    how = {"top_p": 0.6, "top_k": 12, "temperature": 1.4}
    made = await engine.generate(
        input_ids=PROMPT, n=2000, max_new_tokens=1, return_sampling_mask=True, **how
    )
    scaled = log_softmax(reference.logits(PROMPT).numpy()[-1].astype(np.float64) / 1.4)
    ids = sorted(allowed(scaled, how, 0.0))
    assert made[0].sampling_mask.ids.tolist() == ids
    expected = np.exp(scaled[ids])
    expected *= 2000 / expected.sum()
    drawn = np.array([int(one.output_ids[0]) for one in made])
    counts = np.array([(drawn == id_).sum() for id_ in ids])
    # With these degrees of freedom (below 12), the probability of more is below 1e-6.
    assert counts.sum() == 2000
    assert ((counts - expected) ** 2 / expected).sum() < 50


async def test_raw_logprobs(engine: sglrl.Client, reference: Reference) -> None:
    """Neither temperature nor penalties, biases or a grammar change them."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.5, "top_p": 0.8},
        {"temperature": 0, "presence_penalty": 1.5},
        {"temperature": 1.3, "frequency_penalty": 0.5, "seed": 1},
        {"logit_bias": {300: 4.0, 301: -100.0}},
        {"regex": "[a-z ]{300}", "top_k": 9, "return_sampling_mask": True},
        {"min_new_tokens": 60},
    ]
    made = await asyncio.gather(
        *(
            engine.generate(
                input_ids=PROMPT,
                **LONG,
                **how,
                top_logprobs=3 if i % 2 else 0,
                logprobs_mode="raw_logprobs",
                token_ids_logprob=GIVEN,
            )
            for i, how in enumerate(ways)
        ),
        engine.generate(input_ids=PROMPT, **LONG, temperature=2.0),
    )
    for completion in made[:-1]:
        rows = log_softmax(logits_of(reference, completion))
        expected = rows[np.arange(len(rows)), completion.output_ids]
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)
        scores = await engine.score([*PROMPT, *completion.output_ids.tolist()], start=len(PROMPT))
        np.testing.assert_allclose(completion.logprobs, scores, atol=2 * TOLERANCE, rtol=0)
        given = completion.token_ids_logprobs
        np.testing.assert_allclose(given, rows[:, GIVEN], atol=TOLERANCE, rtol=0)
        top = completion.top_logprobs
        if top is not None:
            best = np.sort(rows, axis=1)[:, ::-1][:, :3]
            np.testing.assert_allclose(top.logprobs, best, atol=TOLERANCE, rtol=0)
            there = np.take_along_axis(rows, top.ids.astype(np.int64), axis=1)
            np.testing.assert_allclose(there, best, atol=TOLERANCE, rtol=0)
    expected = reference.logprobs_of(PROMPT, made[-1].output_ids, 2.0)
    np.testing.assert_allclose(made[-1].logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("limits", [{}, {"top_k": 4, "top_p": 0.9}], ids=["alone", "limits"])
async def test_grammar(engine: sglrl.Client, reference: Reference, limits: dict[str, Any]) -> None:
    """The mask has the tokens that the grammar allows and the limits keep."""
    wanted = {"max_new_tokens": 40, "regex": "[0-9]{3}-[0-9]{4}", "return_sampling_mask": True}
    made = await engine.generate("Call", **wanted, **limits, logprobs=True)
    logits = logits_of(reference, made)
    decode = engine.tokenizer.decode
    text = ""
    for i, (ids, token) in enumerate(
        zip(made.sampling_mask.sets(), made.output_ids.tolist(), strict=True)
    ):
        assert token in ids
        if len(text) == 8:
            assert set(ids.tolist()) <= set(engine.info.eos_token_ids)
            continue
        for id_ in ids.tolist():
            after = text + decode([id_])
            assert len(after) <= 8
            assert all(c == "-" if at == 3 else c in "0123456789" for at, c in enumerate(after)), (
                after
            )
        text += decode([token])
        if not limits:
            # Without limits, the logprobs are those of the tokens in the mask.
            expected = logits[i][token] - np.logaddexp.reduce(logits[i][ids])
            assert abs(made.logprobs[i] - expected) < TOLERANCE
            assert len(ids) >= (1 if len(text) == 4 else 10)
        else:
            assert len(ids) <= 4
    assert text == made.text


async def test_biased_tokens(engine: sglrl.Client, reference: Reference) -> None:
    likely = np.argsort(-reference.logits(PROMPT).numpy()[-1])[:3].tolist()
    bias = {likely[0]: -np.inf, likely[1]: -1e9, 444: 3.0}
    how = {"top_p": 0.8, "temperature": 0.9}
    made = await engine.generate(
        input_ids=PROMPT,
        **LONG,
        **how,
        logit_bias=bias,
        logprobs_mode="processed_logprobs",
        return_sampling_mask=True,
    )
    logits = logits_of(reference, made)
    for token, value in bias.items():
        logits[:, token] += max(value, -1e6)
    check(made, logits, how, "processed_logprobs")
    assert not np.isin(made.sampling_mask.ids, likely[:2]).any()


async def test_streams(engine: sglrl.Client, reference: Reference) -> None:
    stream = engine.stream(
        input_ids=PROMPT,
        **LONG,
        top_p=0.7,
        return_sampling_mask=True,
        stop_token_ids=[3],
        token_ids_logprob=GIVEN,
    )
    chunks = [chunk async for chunk in stream]
    made = stream.completion
    given = np.concatenate([chunk.token_ids_logprobs for chunk in chunks])
    assert given.tolist() == made.token_ids_logprobs.tolist()
    assert len(chunks) > 1
    sets = [ids.tolist() for chunk in chunks for ids in chunk.sampling_mask.sets()]
    assert sets == [ids.tolist() for ids in made.sampling_mask.sets()]
    check(made, logits_of(reference, made), {"top_p": 0.7})
    plain = engine.stream(input_ids=PROMPT, max_new_tokens=4)
    assert [chunk.sampling_mask async for chunk in plain] == [None] * 4


async def test_after_a_pause_and_an_abort(engine: sglrl.Client, reference: Reference) -> None:
    how = {"top_p": 0.7, "temperature": 1.2}
    wanted = {**LONG, **how, "return_sampling_mask": True, "token_ids_logprob": GIVEN}
    wanted["max_new_tokens"] = 1500
    calls = [asyncio.ensure_future(engine.generate(input_ids=PROMPT, **wanted)) for _ in range(3)]
    for mode in ("retract", "in_place", "retract"):
        (first,) = await engine.stats()
        while (await engine.stats())[0].engine.kv_tokens < first.engine.kv_tokens + 60:
            pass
        await engine.pause(mode)
        await engine.resume()
    await engine.abort()
    for made in await asyncio.gather(*calls):
        assert made.finish_reason == "abort"
        assert len(made.output_ids) > 30
        check(made, logits_of(reference, made), how)


@pytest.mark.parametrize("inflight", ["continue", "retract"])
async def test_through_weight_updates(
    engine: sglrl.Client, reference: Reference, inflight: Any
) -> None:
    """Two updates with the same weights, so that one reference computes all tokens."""
    how = {"min_p": 0.1, "temperature": 1.5}
    wanted = {**LONG, **how, "return_sampling_mask": True, "max_new_tokens": 600}
    first = engine.weight_version
    calls = [asyncio.ensure_future(engine.generate(input_ids=PROMPT, **wanted)) for _ in range(3)]
    for _ in range(2):
        (before,) = await engine.stats()
        while (await engine.stats())[0].engine.kv_tokens < before.engine.kv_tokens + 60:
            pass
        await engine.update_weights(reference.model, inflight=inflight)
    for made in await asyncio.gather(*calls):
        assert [span.version for span in made.versions] == [first, first + 1, first + 2]
        check(made, logits_of(reference, made), how)


async def test_turns_and_their_tensors(engine: sglrl.Client, reference: Reference) -> None:
    """A trainer computes the logprobs of the sampled tokens from the mask in the batch."""
    trajectories = []
    for count in (1, 2):
        async with engine.session(
            input_ids=PROMPT,
            temperature=1.3,
            top_p=0.8,
            logprobs_mode="processed_logprobs",
            return_sampling_mask=True,
        ) as session:
            for turn in range(count):
                await session.generate(max_new_tokens=9, top_k=40 - 30 * turn)
                session.observe([20, 21, 22])
            trajectories.append(session.trajectory())
    async with engine.session(input_ids=PROMPT) as plain:
        await plain.generate(max_new_tokens=5)
        trajectories.append(plain.trajectory())
    assert trajectories[-1].sampling_mask is None
    for trajectory in trajectories[:-1]:
        mask = trajectory.sampling_mask
        assert (mask.lengths > 0).tolist() == trajectory.loss_mask.tolist()
    batch = stack(trajectories)
    with torch.inference_mode():
        logits = torch.stack(
            [reference.model(input_ids=ids[None]).logits[0] for ids in batch["input_ids"]]
        )
    limited = apply_sampling_mask(logits / 1.3, batch["mask_ids"], batch["mask_lengths"])
    found = token_logprobs(limited, batch["input_ids"])
    sampled = batch["loss_mask"][:2]
    torch.testing.assert_close(
        found[:2][sampled], batch["logprobs"][:2][sampled], atol=TOLERANCE, rtol=0
    )
    # Without the mask they differ.
    whole = token_logprobs(logits / 1.3, batch["input_ids"])
    assert (whole[:2][sampled] - batch["logprobs"][:2][sampled]).abs().mean() > 0.1


@pytest.mark.parametrize("temperature", [0.4, 2.5])
async def test_scores_at_a_temperature(
    engine: sglrl.Client, reference: Reference, temperature: float
) -> None:
    """Scores at several temperatures and other calls are prefilled in one batch."""
    texts = [[7 + (i * j) % 400 for j in range(1, 20 + 30 * i)] for i in range(1, 4)]
    assert await engine.flush_cache()
    *scores, top, plain, made = await asyncio.gather(
        *(engine.score(ids, temperature=temperature, start=5 * i) for i, ids in enumerate(texts)),
        engine.score(texts[0], temperature=temperature + 0.1, top_logprobs=3),
        engine.score(texts[1]),
        engine.generate(input_ids=texts[2], max_new_tokens=6, temperature=0.7, logprobs=True),
    )

    def expected(ids: list[int], at: float) -> np.ndarray:
        return reference.logprobs(ids, at)[:-1][np.arange(len(ids) - 1), ids[1:]]

    tolerance = TOLERANCE / min(1, temperature)
    for i, (ids, found) in enumerate(zip(texts, scores, strict=True)):
        values = found[1:] if i == 0 else found
        wanted = expected(ids, temperature)[max(0, 5 * i - 1) :]
        np.testing.assert_allclose(values, wanted, atol=tolerance, rtol=0)
    rows = np.sort(reference.logprobs(texts[0], temperature + 0.1), axis=1)[:, ::-1][:-1, :3]
    np.testing.assert_allclose(top.top_logprobs[1:], rows, atol=tolerance, rtol=0)
    np.testing.assert_allclose(plain[1:], expected(texts[1], 1.0), atol=TOLERANCE, rtol=0)
    wanted = reference.logprobs_of(texts[2], made.output_ids, 0.7)
    np.testing.assert_allclose(made.logprobs, wanted, atol=2 * TOLERANCE, rtol=0)


async def test_almost_all_tokens(engine: sglrl.Client, reference: Reference) -> None:
    made = await engine.generate(
        input_ids=PROMPT, max_new_tokens=4, temperature=50.0, top_p=0.99, return_sampling_mask=True
    )
    assert (made.sampling_mask.lengths > 480).all()
    check(made, logits_of(reference, made), {"temperature": 50.0, "top_p": 0.99})


async def test_masks_that_are_too_large() -> None:
    found = run_program("engine.mask_limit_program")
    assert found["left"] == [0, 2]
    assert found["aborted"] == ["1."]
    ((call, kind, message),) = found["errors"]
    assert (call, kind) == (1, "InvalidRequest")
    assert message.startswith("the sampling masks of the first 2 tokens have more than 16,777,216")
