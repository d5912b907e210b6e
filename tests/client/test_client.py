"""More tests of the client with a real engine: inputs, order, cancellation, routing, starts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine.programs import run_program
from engine.reference import Reference
from transformers import AutoModelForCausalLM, Gemma2Config

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


async def until_idle(client: sglrl.Client) -> None:
    """Wait until the engine is idle.

    The engine answers each call of ``stats`` between two scheduler steps, so no sleep is needed.
    """
    while any(s.engine.running or s.engine.waiting for s in await client.stats()):
        pass


async def until_running(client: sglrl.Client, count: int) -> None:
    while sum(s.engine.running for s in await client.stats()) < count:
        pass


async def test_messages_use_the_chat_template(client: sglrl.Client) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one + two?"},
    ]
    expected = client.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    one = await client.generate(messages=messages, max_new_tokens=2)
    assert one.prompt_ids.tolist() == expected
    several = await client.generate(messages=[messages, messages[1:]], max_new_tokens=2)
    assert several[0].prompt_ids.tolist() == expected
    assert len(several[1].prompt_ids) < len(expected)


async def test_text_prompts_and_lists_in_order(client: sglrl.Client) -> None:
    texts = ["one", "two three", "four five six seven"]
    made = await client.generate(texts, n=2, max_new_tokens=3, ignore_eos=True)
    assert [len(group) for group in made] == [2, 2, 2]
    for text, group in zip(texts, made, strict=True):
        for completion in group:
            assert completion.prompt_ids.tolist() == client.tokenizer(text)["input_ids"]
            assert completion.text == client.tokenizer.decode(
                completion.output_ids, skip_special_tokens=True
            )


async def test_a_completion_describes_itself(client: sglrl.Client) -> None:
    made = await client.generate(input_ids=PROMPT, max_tokens=5, ignore_eos=True)
    assert made.versions == ((0, 5, 0),)
    assert made.worker == 0
    assert made.resumed == 0
    assert made.logprobs is None
    assert 0 <= made.timing.queued <= made.timing.first_token <= made.timing.total
    assert "5 new tokens" in repr(made)


async def test_a_list_of_arrays_is_a_list_of_prompts(client: sglrl.Client) -> None:
    lists = [PROMPT, PROMPT[:3]]
    for given in ([np.array(ids) for ids in lists], [torch.tensor(ids) for ids in lists]):
        made = await client.generate(input_ids=given, max_new_tokens=2)
        assert [c.prompt_ids.tolist() for c in made] == lists
        assert [len(scores) for scores in await client.score(given)] == [len(PROMPT), 3]


async def test_stats_and_flush(client: sglrl.Client) -> None:
    await client.generate(input_ids=PROMPT * 8, max_new_tokens=4)
    before = (await client.stats())[0].engine
    await client.generate(input_ids=PROMPT * 8, max_new_tokens=4, ignore_eos=True)
    after = (await client.stats())[0].engine
    assert after.generated_tokens - before.generated_tokens == 4
    assert after.prompt_tokens - before.prompt_tokens == 64
    assert after.cached_tokens > before.cached_tokens
    assert 0 < after.cache_hit_rate < 1
    assert after.kv_capacity > 1000
    assert 0 <= after.kv_usage <= 1
    assert after.tokens_per_second > 0
    assert await client.flush_cache()
    fresh = await client.generate(input_ids=PROMPT * 8, max_new_tokens=4)
    assert fresh.cached_tokens == 0


async def test_a_flush_under_load_says_so(client: sglrl.Client) -> None:
    task = asyncio.ensure_future(
        client.generate(input_ids=PROMPT, max_new_tokens=1500, ignore_eos=True)
    )
    await until_running(client, 1)
    assert not await client.flush_cache()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(client)
    assert await client.flush_cache()


async def test_cancellation_and_deadlines_stop_the_engine(client: sglrl.Client) -> None:
    long = {"max_new_tokens": 1900, "ignore_eos": True}
    tasks = [asyncio.ensure_future(client.generate(input_ids=PROMPT, **long)) for _ in range(3)]
    await until_running(client, 3)
    for task in tasks:
        task.cancel()
    assert {type(e) for e in await asyncio.gather(*tasks, return_exceptions=True)} == {
        asyncio.CancelledError
    }
    await until_idle(client)
    with pytest.raises(sglrl.DeadlineExceeded):
        await client.generate(input_ids=PROMPT, timeout=0.2, **long)
    await until_idle(client)
    stream = client.stream(input_ids=PROMPT, **long)
    async for _ in stream:
        break
    await stream.aclose()
    await until_idle(client)
    generated = (await client.stats())[0].engine.generated_tokens
    assert generated > 0
    assert client.workers[0].load == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"input_ids": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "list of prompts is empty"),
        ({"prompt": ["a", "b\ud800"]}, "lone surrogate"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
        ({"prompt": "a", "input_ids": [1]}, "exactly one"),
        ({}, "exactly one"),
        ({"input_ids": [512]}, "512 is outside"),
        ({"input_ids": [-1]}, "-1 is outside"),
        ({"input_ids": [True]}, "integers"),
        ({"input_ids": [5] * 3000}, "3000 tokens.*2048"),
        ({"input_ids": [5], "max_new_tokens": 0}, "at least 1"),
        ({"input_ids": [5], "max_new_tokens": 4000}, "does not fit"),
        ({"input_ids": [5], "temperature": float("nan")}, "temperature"),
        ({"input_ids": [5], "top_logprobs": 513}, r"0\.\.512"),
        ({"input_ids": [5], "temprature": 1.0}, "did you mean 'temperature'"),
    ],
)
async def test_bad_requests(client: sglrl.Client, values: dict[str, object], says: str) -> None:
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await client.generate(**values)
    assert len((await client.generate(input_ids=PROMPT, max_new_tokens=2)).output_ids) <= 2


async def use_all_of(client: sglrl.Client) -> None:
    """Use the maximum number of tokens in every kind of request."""
    info = client.info
    prompt = [5 + i % 400 for i in range(info.max_prompt_tokens)]
    longest = await client.generate(input_ids=prompt, max_new_tokens=1)
    assert len(longest.output_ids) == 1
    for given in (1, 100, len(prompt) - 1):
        room = info.max_total_tokens - given
        made = await client.generate(
            input_ids=prompt[:given], max_new_tokens=room, ignore_eos=True, timeout=300
        )
        assert len(made.output_ids) == room
        with pytest.raises(sglrl.InvalidRequest, match=f"at most {room}$"):
            await client.generate(input_ids=prompt[:given], max_new_tokens=room + 1)
    assert len((await client.next_token_logprobs(prompt, 3)).logprobs) == 3
    # Every output of maximum length can be scored.
    whole = [*made.prompt_ids, *made.output_ids]
    assert len(await client.score(whole)) == info.max_total_tokens
    with pytest.raises(sglrl.InvalidRequest, match=rf"{len(whole) + 1} .* at most {len(whole)} "):
        await client.score([*whole, 5])


async def test_the_whole_context_can_be_used(qwen: Path, reference: Reference) -> None:
    async with sglrl.launch(qwen, device="cpu", context_length=300) as client:
        info = client.info
        assert info.context_length == 300
        assert info.max_total_tokens == info.max_prompt_tokens + 1 == 298
        await use_all_of(client)
        text = [5 + i * i % 400 for i in range(info.max_total_tokens)]
        rows = reference.logprobs(text)[:-1]
        np.testing.assert_allclose(
            (await client.score(text))[1:], rows[np.arange(len(rows)), text[1:]], atol=1e-4, rtol=0
        )


async def test_a_cache_smaller_than_the_context_can_be_used_whole(qwen: Path) -> None:
    async with sglrl.launch(qwen, device="cpu", max_total_tokens=200) as small:
        assert small.info.kv_cache_tokens == 200
        assert small.info.max_total_tokens == 198
        await use_all_of(small)


async def test_lengths_that_are_allowed_are_those_that_sglang_makes(qwen: Path) -> None:
    """The lengths are also checked with pages, which SGLang supports only on GPUs."""
    assert run_program("engine.lengths_program", qwen) == []


async def test_pages_need_a_gpu(qwen: Path) -> None:
    with pytest.raises(sglrl.UsageError, match="page_size=16 needs a GPU"):
        sglrl.launch(qwen, device="cpu", page_size=16)
    sglrl.launch(qwen, device="cpu", page_size=1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(qwen, device="cpu", replicas=2) as client:
        yield client


async def test_samples_and_sessions_stay_where_their_prefix_is(pair: sglrl.Client) -> None:
    assert [w.state for w in pair.workers] == ["ready", "ready"]
    assert len({w.pid for w in pair.workers}) == 2
    for base in (20, 120, 220):
        prompt = [base + i % 70 for i in range(100)]
        samples = await pair.generate(input_ids=prompt, n=4, max_new_tokens=2)
        assert len({s.worker for s in samples}) == 1
    workers = set()
    for session in ("a", "b", "c", "d"):
        history = [30 + 7 * len(session) + ord(session)] * 40
        homes = set()
        for _ in range(3):
            turn = await pair.generate(input_ids=history, session=session, max_new_tokens=4)
            homes.add(turn.worker)
            history = [*history, *turn.output_ids.tolist(), 3]
        assert len(homes) == 1
        assert turn.cached_tokens >= 40
        workers |= homes
    both = [await pair.generate(input_ids=PROMPT, max_new_tokens=2, worker=i) for i in (0, 1)]
    assert [c.worker for c in both] == [0, 1]
    assert [s.worker for s in await pair.stats()] == [0, 1]


async def test_models_that_cannot_be_loaded(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(sglrl.ModelError, match="there is no model"):
        sglrl.launch(tmp_path / "missing")
    with pytest.raises(sglrl.ModelError, match=r"no config\.json"):
        sglrl.launch(tmp_path)
    pattern = tmp_path / "step[5]"
    shutil.copytree(qwen, pattern)
    with pytest.raises(sglrl.ModelError, match=r"holds one of \* \? \["):
        sglrl.launch(pattern)
    corrupt = tmp_path / "corrupt"
    shutil.copytree(qwen, corrupt)
    (corrupt / "config.json").write_text('{"architectures": [')
    with pytest.raises(sglrl.ModelError, match="is not JSON: it ends in the middle"):
        sglrl.launch(corrupt)
    with pytest.raises(sglrl.UsageError, match="did you mean 'mem_fraction_static'"):
        sglrl.launch(qwen, mem_fraction_statc=0.5)
    with pytest.raises(sglrl.UsageError, match="is set by sglrl"):
        sglrl.launch(qwen, model_path="x")


async def test_a_model_that_a_cpu_computes_wrongly(qwen: Path, tmp_path: Path) -> None:
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        hidden_act="gelu_pytorch_tanh",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(qwen / name, tmp_path)
    with pytest.raises(sglrl.WorkerStartError, match="caps the logits of its attention"):
        async with sglrl.launch(tmp_path, device="cpu"):
            pass


async def test_corrupt_weights(qwen: Path, tmp_path: Path) -> None:
    corrupt = tmp_path / "corrupt"
    shutil.copytree(qwen, corrupt)
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(sglrl.WorkerStartError) as caught:
        async with sglrl.launch(corrupt, device="cpu", start_timeout=3600):
            pytest.fail("it cannot have started")
    assert "safetensors" in caught.value.output.lower()
