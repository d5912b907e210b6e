"""The next token's distribution equals that of Hugging Face transformers.

This holds however the request is batched, split or cached. The tests run in both of SGLang's loops,
because queries take one path in the normal loop (CPU) and another in the overlapping loop (GPU).
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

import sglrl
from sglrl.launching.tiny_model import make_model

from .policies import until_idle
from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLERANCE = 1e-4
CHUNK = 64
PROMPTS = [[3 + (7 * i + 11 * j * j) % 500 for j in range(1 + 5 * i)] for i in range(6)]


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[False, True], ids=["normal", "overlap"]
)
async def engine(request: pytest.FixtureRequest, qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        qwen,
        device="cpu",
        disable_overlap_schedule=not request.param,
        chunked_prefill_size=CHUNK,
    ) as client:
        yield client


async def test_equals_the_reference(engine: sglrl.Client, reference: Reference) -> None:
    assert await engine.flush_cache()
    # The second time all but the last token of each prompt is cached.
    for again in range(2):
        found = await asyncio.gather(*(engine.next_token_logprobs(p) for p in PROMPTS))
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert one.logprobs.dtype == np.float32
            assert one.logprobs.shape == (engine.info.vocab_size,)
            assert not one.logprobs.flags.writeable
            assert not one.logprobs.flags.owndata
            assert one.token_ids is None
            assert one.version == 0
            assert one.worker == 0
            if again:
                assert one.cached_tokens == len(prompt) - 1
            expected = reference.logprobs(prompt)[-1]
            np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_the_likeliest_of_them(engine: sglrl.Client) -> None:
    sizes = [1, 5, engine.info.vocab_size]
    whole, *some = await asyncio.gather(
        engine.next_token_logprobs(PROMPTS[3]),
        *(engine.next_token_logprobs(PROMPTS[3], top_k=k) for k in sizes),
    )
    order = np.sort(whole.logprobs)[::-1]
    for k, top in zip(sizes, some, strict=True):
        assert top.token_ids is not None
        assert top.token_ids.dtype == np.int32
        assert top.token_ids.shape == top.logprobs.shape == (k,)
        np.testing.assert_allclose(top.logprobs, order[:k], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(
            top.logprobs, whole.logprobs[top.token_ids], atol=TOLERANCE, rtol=0
        )
    # When run alone, the last request is also the last of its batch.
    alone = await engine.next_token_logprobs(PROMPTS[3], 5)
    np.testing.assert_allclose(alone.logprobs, order[:5], atol=TOLERANCE, rtol=0)


async def test_a_prompt_prefilled_in_parts(engine: sglrl.Client, reference: Reference) -> None:
    long = [[3 + (i * 13 + j * j * 7) % 500 for j in range(2 * CHUNK + 9 + i)] for i in range(3)]
    assert await engine.flush_cache()
    found = await asyncio.gather(*(engine.next_token_logprobs(p) for p in [*long, *PROMPTS]))
    for prompt, one in zip([*long, *PROMPTS], found, strict=True):
        expected = reference.logprobs(prompt)[-1]
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_among_generation(engine: sglrl.Client, reference: Reference) -> None:
    """Other requests in the batch do not matter: sampling overwrites logits with probabilities."""
    assert await engine.flush_cache()
    sampled = [
        engine.generate(
            input_ids=[[9 + i, *prompt] for prompt in PROMPTS],
            max_new_tokens=30,
            temperature=0.3 + i,
            top_p=0.8,
            frequency_penalty=0.5,
            logprobs=True,
        )
        for i in range(2)
    ]
    scored = engine.score(PROMPTS[5])
    asked = [engine.next_token_logprobs(p, k) for p in PROMPTS for k in (None, 3)]
    *_, scores = await asyncio.gather(*asked, *sampled, scored)
    np.testing.assert_allclose(
        scores[1:],
        reference.logprobs(PROMPTS[5])[:-1][np.arange(len(PROMPTS[5]) - 1), PROMPTS[5][1:]],
        atol=TOLERANCE,
        rtol=0,
    )
    running = asyncio.ensure_future(
        engine.generate(input_ids=PROMPTS[0], max_new_tokens=200, ignore_eos=True)
    )
    step = list(PROMPTS[1])
    for _ in range(10):
        # Query like a client that samples by itself: each prompt adds one token to the last prompt.
        one = await engine.next_token_logprobs(step)
        expected = reference.logprobs(step)[-1]
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
        step.append(int(one.logprobs.argmax()))
    assert len((await running).output_ids) == 200


def grown(seed: int, count: int) -> list[list[int]]:
    """Return prompts that grow from each other.

    Each prompt is an earlier prompt, possibly without its last tokens, plus up to 20 new tokens.
    There are only few different tokens, so prompts often share longer prefixes.
    """
    rng = np.random.default_rng(seed)
    prompts = [[7]]
    while len(prompts) < count:
        base = prompts[rng.integers(len(prompts))]
        more = rng.integers(3, 6, size=rng.integers(21) if rng.random() < 0.3 else 1)
        prompts.append([*base[: len(base) - rng.integers(min(3, len(base)))], *map(int, more)])
    return prompts


async def ask_in_groups(
    client: sglrl.Client, reference: Reference, prompts: list[list[int]], seed: int
) -> list[sglrl.NextTokenLogprobs]:
    """Query groups of prompts at once, two of them twice, and check all results."""
    rng = np.random.default_rng(seed)
    answers = []
    begin = 0
    while begin < len(prompts):
        group = prompts[begin : begin + int(rng.integers(1, 40))]
        begin += len(group)
        group += [group[0], group[-1]]
        found = await asyncio.gather(*(client.next_token_logprobs(p) for p in group))
        for prompt, one in zip(group, found, strict=True):
            expected = reference.logprobs(prompt)[-1]
            np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
        answers += found
    return answers


async def test_prompts_that_share_and_grow(engine: sglrl.Client, reference: Reference) -> None:
    """An idle SGLang checks that no memory is lost. After a flush, all memory is free."""
    assert await engine.flush_cache()
    prompts = grown(seed=1, count=300)
    found = await ask_in_groups(engine, reference, prompts, seed=2)
    assert sum(one.cached_tokens for one in found) > 300
    await until_idle(engine)
    (stats,) = await engine.stats()
    assert stats.engine.kv_tokens == 0
    again = await asyncio.gather(*(engine.next_token_logprobs(p) for p in prompts))
    assert [one.cached_tokens for one in again] == [len(p) - 1 for p in prompts]


@pytest.mark.parametrize("engine", [False], ids=["normal"], indirect=True)
async def test_a_beginning_in_common_is_computed_once(
    engine: sglrl.Client, reference: Reference
) -> None:
    assert await engine.flush_cache()
    begin = [3 + (i * 17 + i * i) % 500 for i in range(CHUNK)]
    prompts = [[*begin, 5 + i % 7, 9 + i] for i in range(30)]
    found = await asyncio.gather(*(engine.next_token_logprobs(p) for p in prompts))
    assert sorted(one.cached_tokens for one in found)[1] >= len(begin)
    for prompt, one in zip(prompts, found, strict=True):
        expected = reference.logprobs(prompt)[-1]
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_all_beginnings_of_a_text(engine: sglrl.Client, reference: Reference) -> None:
    assert await engine.flush_cache()
    text = [3 + (i * 29 + i * i) % 500 for i in range(CHUNK + 20)]
    found = await asyncio.gather(
        *(engine.next_token_logprobs(text[: i + 1]) for i in range(len(text)))
    )
    rows = reference.logprobs(text)
    np.testing.assert_allclose([one.logprobs for one in found], rows, atol=TOLERANCE, rtol=0)


async def test_prompts_that_go_on_after_a_flush(engine: sglrl.Client, reference: Reference) -> None:
    begin = [3 + (i * 23 + i * i) % 500 for i in range(20)]
    for i in range(3):
        assert await engine.flush_cache()
        one = await engine.next_token_logprobs([*begin, *range(5, 5 + i)])
        assert one.cached_tokens == 0
        expected = reference.logprobs([*begin, *range(5, 5 + i)])[-1]
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_where_memory_is_short(qwen: Path, reference: Reference) -> None:
    """Cached prefixes are evicted for new requests, as for any other request."""
    async with sglrl.launch(
        qwen, device="cpu", max_total_tokens=160, max_running_requests=8, context_length=128
    ) as client:
        prompts = [p for p in grown(seed=3, count=150) if len(p) < 100]
        found = await ask_in_groups(client, reference, prompts, seed=4)
        assert any(one.cached_tokens for one in found)
        # The last prompt extends a prefix that was evicted meanwhile, which freed memory.
        assert await client.flush_cache()
        begin = [3 + (i * 19 + i * i) % 500 for i in range(50)]
        await client.next_token_logprobs(begin)
        for i in range(2):
            await client.next_token_logprobs([100 + i + j for j in range(60)])
        one = await client.next_token_logprobs([*begin, 7])
        assert one.cached_tokens == 0
        expected = reference.logprobs([*begin, 7])[-1]
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
        completion = await client.generate(input_ids=[5] * 100, max_new_tokens=20, temperature=0)
        assert completion.output_ids.tolist() == reference.greedy([5] * 100, 20)


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
async def test_rows_in_memory_that_is_shared(models: Path, overlap: bool) -> None:
    """The vocabulary is large enough for shared memory.

    Queries run alone, together and with other requests, and rows are held for a long time.
    """
    folder = make_model(models / "large", vocab_size=30_000)
    reference = Reference(folder)
    prompts = [[3 + (7 * i + 11 * j * j) % 29_000 for j in range(4 + i)] for i in range(40)]
    async with sglrl.launch(
        folder, device="cpu", disable_overlap_schedule=not overlap, max_total_tokens=4096
    ) as client:
        (reader,) = client.requests.driver.workers.frames.readers.values()
        kept = []
        for _ in range(3):
            found = await asyncio.gather(
                *(client.next_token_logprobs(p) for p in prompts),
                *(client.next_token_logprobs(p, 5) for p in prompts[::3]),
                client.generate(input_ids=prompts[5], max_new_tokens=4),
            )
            whole, likeliest = found[: len(prompts)], found[len(prompts) : -1]
            for prompt, one in zip(prompts, whole, strict=True):
                assert isinstance(one, sglrl.NextTokenLogprobs)
                expected = reference.logprobs(prompt)[-1]
                np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
            for one, top in zip(whole[::3], likeliest, strict=True):
                np.testing.assert_allclose(
                    top.logprobs, np.sort(one.logprobs)[:-6:-1], atol=TOLERANCE, rtol=0
                )
            kept += whole[::4]
            assert reader.held >= len(kept)
        del found, whole, likeliest, one, top
        # Rows of cancelled calls are reused.
        for _ in range(3):
            calls = [asyncio.ensure_future(client.next_token_logprobs(p)) for p in prompts]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await until_idle(client)
        del calls, call
        gc.collect()
        assert reader.held == len(kept)
        for prompt, one in zip([*prompts[::4]] * 3, kept, strict=True):
            expected = reference.logprobs(prompt)[-1]
            np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)


async def test_cancelled_and_late(engine: sglrl.Client, reference: Reference) -> None:
    calls = [asyncio.ensure_future(engine.next_token_logprobs([5, 6, i % 500])) for i in range(100)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in done[::2])
    expected = reference.logprobs([5, 6, 99])[-1]
    assert isinstance(done[99], sglrl.NextTokenLogprobs)
    np.testing.assert_allclose(done[99].logprobs, expected, atol=TOLERANCE, rtol=0)
    with pytest.raises(sglrl.DeadlineExceeded):
        await engine.next_token_logprobs([1] * 2000, timeout=1e-4)
    assert (await engine.next_token_logprobs([5, 6, 99])).cached_tokens == 2
    await until_idle(engine)
    assert all(worker.load == 0 for worker in engine.workers)


async def test_scores_with_the_likeliest_tokens(engine: sglrl.Client, reference: Reference) -> None:
    prompt = [3 + (j * j * 7) % 500 for j in range(CHUNK + 20)]
    rows = reference.logprobs(prompt)
    for start in (0, 1, 2, 40, len(prompt) - 1):
        assert await engine.flush_cache()
        for _ in range(2):
            scores = await engine.score(prompt, start=start, top_logprobs=4)
            n = len(prompt) - start
            assert scores.logprobs.shape == (n,)
            assert scores.top_ids.shape == scores.top_logprobs.shape == (n, 4)
            assert scores.top_ids.dtype == np.int32
            first = 0
            if start == 0:
                assert np.isnan(scores.logprobs[0])
                assert np.isnan(scores.top_logprobs[0]).all()
                assert (scores.top_ids[0] == -1).all()
                first = 1
            expected = rows[start + first - 1 : -1]
            chosen = expected[np.arange(len(expected)), prompt[start + first :]]
            np.testing.assert_allclose(scores.logprobs[first:], chosen, atol=TOLERANCE, rtol=0)
            best = np.sort(expected, axis=1)[:, ::-1][:, :4]
            np.testing.assert_allclose(scores.top_logprobs[first:], best, atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(
                np.take_along_axis(expected, scores.top_ids[first:], axis=1),
                best,
                atol=TOLERANCE,
                rtol=0,
            )
