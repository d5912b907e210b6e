"""Tests of the engine on CUDA devices: overlap scheduling, CUDA graphs, tensor parallelism.

Run ``pytest tests/gpu`` on a host with a GPU. Tests that need two GPUs are skipped on a host with
one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from client.test_client import use_all_of
from engine.reference import Reference
from engine.test_finite import NOWHERE, WAYS
from engine.test_sampling import chi_square
from safetensors.torch import load_file, save_file

import sglrl
from sglrl.transport.shared_rows import MAX_BYTES

from .conftest import ARGUMENTS, TOLERANCE, make_gpu_model

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PROMPTS = [[3 + (7 * i + 11 * j * j) % 500 for j in range(3 + 9 * i)] for i in range(6)]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[1, 2], ids=["tp1", "tp2"])
async def gpu(
    request: pytest.FixtureRequest, gpu_model: Path
) -> AsyncIterator[tuple[sglrl.Client, Reference]]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    async with sglrl.launch(gpu_model, device="cuda", tp_size=request.param, **ARGUMENTS) as client:
        yield client, Reference(gpu_model)


async def test_greedy_tokens_and_their_logprobs(gpu: tuple[sglrl.Client, Reference]) -> None:
    client, reference = gpu
    assert client.info.device.startswith("cuda")
    completions = await client.generate(
        input_ids=PROMPTS, max_new_tokens=24, temperature=0, logprobs=True, ignore_eos=True
    )
    worst = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.output_ids) == 24
        expected = reference.logprobs([*prompt, *completion.output_ids])[len(prompt) - 1 : -1]
        chosen = expected[np.arange(24), completion.output_ids]
        worst = max(worst, float(np.abs(completion.logprobs - chosen).max()))
        assert (chosen >= expected.max(axis=1) - 2 * TOLERANCE).all()
    print(f"largest difference of a logprob: {worst:.2e}")
    assert worst < TOLERANCE


async def test_sampled_logprobs_and_scores(gpu: tuple[sglrl.Client, Reference]) -> None:
    client, reference = gpu
    (made, _) = await client.generate(
        input_ids=PROMPTS[2], n=2, max_new_tokens=100, logprobs=True, ignore_eos=True
    )
    expected = reference.logprobs_of(PROMPTS[2], made.output_ids)
    np.testing.assert_allclose(made.logprobs, expected, atol=TOLERANCE, rtol=0)
    scores = await client.score([*PROMPTS[2], *made.output_ids.tolist()])
    np.testing.assert_allclose(scores[len(PROMPTS[2]) :], made.logprobs, atol=TOLERANCE, rtol=0)


async def test_the_next_tokens_distribution_among_generation(
    gpu: tuple[sglrl.Client, Reference],
) -> None:
    client, reference = gpu
    others = asyncio.gather(
        *(client.generate(input_ids=p, max_new_tokens=64, ignore_eos=True) for p in PROMPTS)
    )
    asked = [[*p, 5, 7 + i] for i in range(4) for p in PROMPTS]
    whole = await asyncio.gather(*(client.next_token_logprobs(p) for p in asked))
    likeliest = await asyncio.gather(*(client.next_token_logprobs(p, 5) for p in asked))
    for prompt, one, top in zip(asked, whole, likeliest, strict=True):
        expected = reference.logprobs(prompt)[-1]
        assert one.logprobs.shape == expected.shape
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
        assert abs(float(np.exp(one.logprobs.astype(np.float64)).sum()) - 1) < 1e-3
        np.testing.assert_allclose(top.logprobs, expected[top.token_ids], atol=TOLERANCE, rtol=0)
        assert (top.logprobs >= np.sort(expected)[-5:][::-1] - 2 * TOLERANCE).all()
    await others


async def test_prompts_that_grow_token_by_token(gpu: tuple[sglrl.Client, Reference]) -> None:
    """Run query steps between generation steps. On two GPUs both ranks run the same steps."""
    client, reference = gpu
    running = asyncio.ensure_future(
        client.generate(input_ids=PROMPTS, max_new_tokens=200, ignore_eos=True, temperature=1.0)
    )
    growing = [list(prompt) for prompt in PROMPTS]
    cached = 0
    for _ in range(16):
        found = await asyncio.gather(*(client.next_token_logprobs(p) for p in growing))
        for prompt, one in zip(growing, found, strict=True):
            difference = np.abs(one.logprobs - reference.logprobs(prompt)[-1])
            assert difference.max() < TOLERANCE
            cached += one.cached_tokens == len(prompt) - 1
            prompt.append(int(one.logprobs.argmax()))
    assert cached >= 15 * len(PROMPTS)
    assert all(len(completion.output_ids) == 200 for completion in await running)


async def test_rows_of_a_large_vocabulary(tmp_path: Path) -> None:
    """Rows are copied to memory that the driver reads, and do not change while they are held.

    The test holds more rows than the memory has room for, while other calls are cancelled.
    """
    folder = make_gpu_model(tmp_path / "large", seed=3, vocab_size=150_000)
    reference = Reference(folder)
    prompts = [[3 + (7 * i + 11 * j * j) % 140_000 for j in range(4 + i % 20)] for i in range(64)]
    expected = [reference.logprobs(prompt)[-1] for prompt in prompts]
    async with sglrl.launch(folder, device="cuda", **ARGUMENTS) as client:
        (reader,) = client.requests.driver.workers.frames.readers.values()
        held = []
        while len(held) < MAX_BYTES // (4 * 150_000) + 100:
            given_up = [asyncio.ensure_future(client.next_token_logprobs(p)) for p in prompts]
            await asyncio.sleep(0)
            for call in given_up:
                call.cancel()
            found = await asyncio.gather(*(client.next_token_logprobs(p) for p in prompts))
            held += zip(expected, found, strict=True)
        assert 0 < reader.held < len(held)
        for wanted, one in held:
            np.testing.assert_allclose(one.logprobs, wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", [None, 0])
async def test_temperature_1_follows_the_distribution(
    gpu: tuple[sglrl.Client, Reference], seed: int | None
) -> None:
    client, reference = gpu
    n = 4000
    samples = await client.generate(input_ids=PROMPTS[1], n=n, max_new_tokens=1, seed=seed)
    counts = np.bincount([int(s.output_ids[0]) for s in samples], minlength=512)
    expected = n * np.exp(reference.logprobs(PROMPTS[1])[-1].astype(np.float64))
    assert chi_square(counts, expected) < 4


async def test_a_seed_repeats(gpu: tuple[sglrl.Client, Reference]) -> None:
    client, _ = gpu

    async def draw(**values: object) -> list[list[int]]:
        made = await client.generate(
            input_ids=PROMPTS[3], n=4, max_new_tokens=32, ignore_eos=True, **values
        )
        return [c.output_ids.tolist() for c in made]

    seeded = await draw(seed=3)
    assert len(set(map(tuple, seeded))) == 4
    assert await draw(seed=3) == seeded
    assert await draw(seed=4) != seeded
    assert await draw() != await draw()


async def test_a_stream_is_the_same_and_a_cancelled_call_ends(
    gpu: tuple[sglrl.Client, Reference],
) -> None:
    client, _ = gpu
    wanted = {"max_new_tokens": 40, "temperature": 0, "logprobs": True, "ignore_eos": True}
    whole = await client.generate(input_ids=PROMPTS[4], **wanted)
    stream = client.stream(input_ids=PROMPTS[4], **wanted)
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 1
    np.testing.assert_allclose(stream.completion.logprobs, whole.logprobs, atol=TOLERANCE)
    endless = asyncio.ensure_future(
        client.generate(input_ids=PROMPTS[4], max_new_tokens=2000, ignore_eos=True)
    )
    endless_stream = client.stream(input_ids=PROMPTS[4], max_new_tokens=2000, ignore_eos=True)
    async for _chunk in endless_stream:
        break
    await endless_stream.aclose()
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    # The engine empties its cache only when it is idle on every rank.
    async with asyncio.timeout(60):
        while not await client.flush_cache():
            await client.generate(input_ids=PROMPTS[0], max_new_tokens=1)
    again = await client.generate(input_ids=PROMPTS[4], **wanted)
    assert again.cached_tokens == 0
    np.testing.assert_allclose(again.logprobs, whole.logprobs, atol=TOLERANCE)


async def test_workers_on_cpu_beside_gpus(gpu_model: Path) -> None:
    reference = Reference(gpu_model)
    async with sglrl.launch(gpu_model, device="cpu", dtype="float32") as client:
        assert client.info.device == "cpu"
        made = await client.generate(input_ids=PROMPTS[2], max_new_tokens=16, logprobs=True)
        expected = reference.logprobs_of(PROMPTS[2], made.output_ids)
        np.testing.assert_allclose(made.logprobs, expected, atol=TOLERANCE, rtol=0)
        await client.update_weights(load_file(gpu_model / "model.safetensors"))
        assert client.weight_version == 1


async def test_requests_behind_which_there_is_no_token(
    gpu: tuple[sglrl.Client, Reference], tmp_path: Path
) -> None:
    """Such a request fails alone. A CUDA assertion would fail every other request with it."""
    client, reference = gpu
    pids = [worker.pid for worker in client.workers]
    greedy = {"max_new_tokens": 24, "temperature": 0, "logprobs": True, "ignore_eos": True}
    for count, impossible in NOWHERE.values():
        for way in ({}, {"logprobs": True}):
            with pytest.raises(sglrl.InvalidRequest, match=f"after the {count} generated tokens"):
                await client.generate(
                    input_ids=PROMPTS[1], **{"max_new_tokens": 9, **impossible, **way}
                )
        others = asyncio.ensure_future(client.generate(input_ids=PROMPTS, **greedy))
        sampling = [{"max_new_tokens": 9, **impossible, **way} for way in WAYS.values()]
        calls = [client.generate(input_ids=PROMPTS[1], **values) for values in sampling]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, sglrl.InvalidRequest)
            assert f"no token is allowed after the {count} generated tokens" in str(error)
        for prompt, one in zip(PROMPTS, await others, strict=True):
            expected = reference.logprobs_of(prompt, one.output_ids)
            np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
    diverged = tmp_path / "diverged"
    shutil.copytree(reference.folder, diverged)
    weights = load_file(diverged / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, diverged / "model.safetensors", metadata={"format": "pt"})
    await client.update_weights_from_disk(diverged, check_finite=False)
    # Each request runs alone first, then in a batch with all others.
    for way in ({}, {"logprobs": True}):
        with pytest.raises(sglrl.EngineError, match="not finite"):
            await client.generate(input_ids=PROMPTS[1], max_new_tokens=9, **way)
    calls = [client.generate(input_ids=PROMPTS, max_new_tokens=9, **w) for w in WAYS.values()]
    calls += [client.score(PROMPTS[2]), client.next_token_logprobs(PROMPTS[2])]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, sglrl.EngineError)
        assert "not finite" in str(error)
    await client.update_weights_from_disk(reference.folder)
    for prompt, one in zip(
        PROMPTS, await client.generate(input_ids=PROMPTS, **greedy), strict=True
    ):
        expected = reference.logprobs_of(prompt, one.output_ids)
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)
    assert [worker.pid for worker in client.workers] == pids


@pytest.mark.parametrize(("page", "cache"), [(1, 300), (16, 320), (64, 640)])
async def test_a_small_cache_can_be_used_whole(gpu_model: Path, page: int, cache: int) -> None:
    async with sglrl.launch(
        gpu_model, device="cuda", page_size=page, max_total_tokens=cache, **ARGUMENTS
    ) as client:
        assert client.info.max_total_tokens == cache - 2 * page
        await use_all_of(client)
