"""Arguments of SGLang have their effect in a worker. ``accepted_arguments`` lists them."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.policies import until_idle, until_running
from engine.reference import Reference
from transformers import AutoTokenizer

import sglrl
from sglrl.launching.tiny_model import make_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = [5, 6, 7, 8]
LONG: dict[str, Any] = {"max_new_tokens": 1900, "ignore_eos": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


def launched(model: Path, **args: Any) -> AbstractAsyncContextManager[sglrl.Client]:
    return sglrl.launch(model, device="cpu", timeout=300, **args)


def numbers(log: Path, name: str) -> list[int]:
    """Return the values of ``name`` in SGLang's log lines, such as 4 in "#new-seq: 4"."""
    return [int(number) for number in re.findall(rf"{name}: (\d+)", log_of(log))]


def log_of(folder: Path) -> str:
    (file,) = folder.glob("*.log")
    return file.read_text()


async def test_limits_of_the_engine(qwen: Path, tmp_path: Path) -> None:
    async with launched(
        qwen,
        context_length=256,
        max_running_requests=3,
        max_total_tokens=700,
        prefill_max_requests=2,
        chunked_prefill_size=32,
        disable_radix_cache=True,
        stream_interval=5,
        log_level="info",
        decode_log_interval=7,
        log_dir=tmp_path,
    ) as client:
        assert client.info.context_length == 256
        assert (await client.stats())[0].engine.kv_capacity == 700
        with pytest.raises(sglrl.InvalidRequest, match="256"):
            await client.generate(input_ids=[5] * 300, max_new_tokens=1)
        for _ in range(2):
            completion = await client.generate(input_ids=[5] * 100, max_new_tokens=1)
            assert completion.cached_tokens == 0
        most = 0
        calls = [
            asyncio.ensure_future(
                client.generate(input_ids=[*PROMPT, i], max_new_tokens=100, ignore_eos=True)
            )
            for i in range(7)
        ]
        while not all(call.done() for call in calls):
            most = max(most, (await client.stats())[0].engine.running)
        assert most == 3
        chunks = [
            len(chunk.output_ids)
            async for chunk in client.stream(input_ids=PROMPT, max_new_tokens=21, ignore_eos=True)
        ]
        # A chunk has the tokens of one or more intervals. The first token comes at once.
        assert len(chunks) <= 6, chunks
        await until_idle(client)
    assert max(numbers(tmp_path, "#new-token")) == 32
    assert max(numbers(tmp_path, "#new-seq")) == 2
    assert log_of(tmp_path).count("Decode batch") > 10


async def test_most_tokens_of_a_prefill(qwen: Path, tmp_path: Path) -> None:
    """``max_prefill_tokens`` limits the prompts that are computed together."""
    async with launched(
        qwen,
        max_prefill_tokens=60,
        chunked_prefill_size=-1,
        log_level="info",
        log_dir=tmp_path,
        accelerations=False,
    ) as client:
        await asyncio.gather(
            *(client.generate(input_ids=[i] * 25, max_new_tokens=1) for i in range(5, 25))
        )
    # A prompt is admitted as long as less than the limit is taken.
    assert 50 <= max(numbers(tmp_path, "#new-token")) <= 60 + 25


async def test_a_full_queue_of_the_engine(qwen: Path) -> None:
    async with launched(qwen, max_running_requests=1, max_queued_requests=2) as client:
        running = asyncio.ensure_future(client.generate(input_ids=PROMPT, **LONG))
        await until_running(client, 1)
        calls = [client.generate(input_ids=PROMPT, max_new_tokens=1) for _ in range(5)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        running.cancel()
    full = [error for error in ended if isinstance(error, sglrl.EngineError)]
    assert len(full) == 3, ended
    assert "queue is full" in str(full[0])


async def test_order_of_the_queue(qwen: Path) -> None:
    """``schedule_policy="lof"`` runs the longest outputs first."""
    ended: list[int] = []
    async with launched(qwen, max_running_requests=1, schedule_policy="lof") as client:

        async def call(count: int) -> None:
            await client.generate(input_ids=PROMPT, max_new_tokens=count, ignore_eos=True)
            ended.append(count)

        first = asyncio.ensure_future(client.generate(input_ids=PROMPT, **LONG))
        await until_running(client, 1)
        calls = [asyncio.ensure_future(call(count)) for count in (3, 40, 20)]
        while (await client.stats())[0].engine.waiting < 3:
            pass
        first.cancel()
        await asyncio.gather(*calls)
    assert ended == [40, 20, 3]


@pytest.mark.parametrize(
    ("args", "first"),
    [
        ({}, "urgent"),
        ({"disable_priority_preemption": True}, "running"),
        ({"priority_scheduling_preemption_threshold": 100}, "running"),
    ],
    ids=["preempts", "disabled", "threshold"],
)
async def test_preemption(qwen: Path, args: dict[str, Any], first: str) -> None:
    ended: list[str] = []
    async with launched(
        qwen, max_running_requests=1, enable_priority_scheduling=True, window=8, **args
    ) as client:

        async def call(name: str, priority: int, count: int) -> None:
            await client.generate(
                input_ids=PROMPT, max_new_tokens=count, ignore_eos=True, priority=priority
            )
            ended.append(name)

        running = asyncio.ensure_future(call("running", 0, 600))
        await until_running(client, 1)
        await asyncio.gather(running, call("urgent", 50, 3))
    assert ended[0] == first


@pytest.mark.parametrize("policy", ["lru", "lfu"])
async def test_which_prefix_is_evicted(qwen: Path, policy: str) -> None:
    often, seldom, other = ([token] * 80 for token in (5, 6, 7))
    async with launched(
        qwen, radix_eviction_policy=policy, max_total_tokens=200, accelerations=False
    ) as client:
        for prompt in (often, often, often, seldom, other):
            await client.generate(input_ids=prompt, max_new_tokens=1)
        kept = [
            (await client.generate(input_ids=prompt, max_new_tokens=1)).cached_tokens > 0
            for prompt in (seldom, often)
        ]
    assert kept[0 if policy == "lru" else 1]
    if policy == "lfu":
        assert not kept[0]


async def test_other_settings_of_the_model(qwen: Path, tmp_path: Path) -> None:
    """The model's config and dtypes are changed, and transformers computes the same."""
    changed = tmp_path / "changed"
    model = Reference(qwen).model
    model.config.rms_norm_eps = 0.5
    model.save_pretrained(changed)
    wanted = Reference(changed).logprobs(PROMPT)
    async with launched(
        qwen,
        json_model_override_args=json.dumps({"rms_norm_eps": 0.5}),
        model_impl="transformers",
        log_level="info",
        log_dir=tmp_path,
    ) as client:
        found = await client.score(PROMPT)
    assert "TransformersForCausalLM" in log_of(tmp_path)
    expected = wanted[np.arange(3), PROMPT[1:]]
    np.testing.assert_allclose(found[1:], expected, atol=1e-4)
    plain = Reference(qwen).logprobs(PROMPT)[np.arange(3), PROMPT[1:]]
    assert np.abs(expected - plain).max() > 1e-3


async def test_other_weights_and_precisions(qwen: Path) -> None:
    """Dummy weights; logits in float32 of a bfloat16 model; a KV cache in bfloat16."""
    plain = Reference(qwen).logprobs(PROMPT)[np.arange(3), PROMPT[1:]]
    scores = {}
    for name, args in {
        "dummy": {"load_format": "dummy"},
        "half": {"dtype": "bfloat16"},
        "head": {"dtype": "bfloat16", "enable_fp32_lm_head": True},
        "cache": {"kv_cache_dtype": "bfloat16", "chunked_prefill_size": 2},
    }.items():
        async with launched(qwen, **args) as client:
            scores[name] = (await client.score(PROMPT))[1:]
    assert np.abs(scores["dummy"] - plain).max() > 0.1
    assert 1e-5 < np.abs(scores["cache"] - plain).max() < 0.1
    assert not np.array_equal(scores["head"], scores["half"])
    # Logits in bfloat16 have at most 8 significant bits.
    assert np.abs(scores["head"] - plain).max() < 0.3


async def test_a_tokenizer_of_another_folder(qwen: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", characters="0123456789+-*/= ")
    async with launched(qwen, tokenizer_path=str(other)) as client:
        seven = AutoTokenizer.from_pretrained(other).convert_tokens_to_ids("7")
        completion = await client.generate(
            "12+3=", stop=["77"], max_new_tokens=100, ignore_eos=True, logit_bias={seven: 99.0}
        )
        async with sglrl.connect(client.address) as connected:
            again = await connected.generate("12+3=", max_new_tokens=1)
    tokenizer = AutoTokenizer.from_pretrained(other)
    assert completion.prompt_ids.tolist() == tokenizer("12+3=").input_ids
    assert again.prompt_ids.tolist() == tokenizer("12+3=").input_ids
    assert (completion.text, completion.finish_reason) == ("", "stop")


async def test_code_of_the_models_folder(tmp_path: Path) -> None:
    """``trust_remote_code`` runs a config class in the model's folder.

    The folder's name has a colon, which SGLang keeps for adapters.
    """
    folder = make_model(tmp_path / "own:1")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "configuration_mine.MineConfig"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_mine.py").write_text(
        "from transformers import Qwen3Config\n\n\n"
        'class MineConfig(Qwen3Config):\n    model_type = "mine"\n'
    )
    with pytest.raises(sglrl.SglrlError):
        async with launched(folder):
            pass
    async with launched(folder, trust_remote_code=True) as client:
        made = await client.generate(input_ids=PROMPT, max_new_tokens=3, ignore_eos=True)
        assert len(made.output_ids) == 3


async def test_hooks_and_dumps(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are functions of the user's module. The one here writes what it sees in the worker."""
    (tmp_path / "my_hooks.py").write_text(
        "import gc, json\n\n\n"
        "def factory(config):\n"
        "    def hook(module, args, output):\n"
        "        with open(config['file'], 'a') as file:\n"
        "            print(json.dumps([list(output.shape), gc.get_threshold()]), file=file)\n"
        "    return hook\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen, dumps = tmp_path / "seen.jsonl", tmp_path / "dumps"
    hook = {
        "name": "mine",
        "target_modules": ["model.layers.1.mlp"],
        "hook_factory": "my_hooks:factory",
        "config": {"file": str(seen)},
    }
    async with launched(
        qwen,
        forward_hooks=[hook],
        gc_threshold=[1234, 5, 6],
        debug_tensor_dump_output_folder=str(dumps),
        debug_tensor_dump_layers=[1],
        accelerations=False,
    ) as client:
        await client.generate(input_ids=PROMPT, max_new_tokens=3, ignore_eos=True)
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [4, 64] in [shape for shape, _ in lines]
    assert lines[-1][1] == [1234, 5, 6]
    assert list(dumps.rglob("*.pt"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        ({"constrained_json_disable_any_whitespace": True}, r'\{"a": -?\d+'),
        (
            {"grammar_backend": "llguidance", "constrained_json_whitespace_pattern": "\n?"},
            r'\n?\{\n?"a"\n?:\n?-?\d+',
        ),
    ],
    ids=["xgrammar", "llguidance"],
)
async def test_white_space_of_json(qwen: Path, args: dict[str, Any], pattern: str) -> None:
    async with launched(qwen, **args) as client:
        completions = await client.generate(
            "a", n=8, json_schema=SCHEMA, max_new_tokens=30, temperature=2.0
        )
    for completion in completions:
        assert re.match(pattern, completion.text), completion.text


async def test_no_grammars(qwen: Path) -> None:
    async with launched(qwen, grammar_backend="none") as client:
        with pytest.raises(sglrl.SglrlError, match="grammar"):
            await client.generate("a", json_schema=SCHEMA, max_new_tokens=5)


async def test_what_sglang_checks_itself(qwen: Path) -> None:
    """SGLang compares arguments with each other before the model is loaded."""
    with pytest.raises(sglrl.WorkerStartError) as error:
        async with launched(qwen, enable_priority_scheduling=True, schedule_policy="lpm"):
            pass
    last = str(error.value).splitlines()[-1]
    assert last.startswith("SGLang rejects its arguments: To use priority scheduling")
