"""Endpoints that take text or tokens, with the real engine: transformers confirms the answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

import sglrl
from sglrl.api.tiny_model import make_model
from sglrl.gateway.serving import serve

from .policies import until_idle
from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "The sum of 2 and 3 is"


@pytest.fixture(scope="module")
def policy(models: Path) -> Reference:
    return Reference(make_model(models / "gateway-generate"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(policy: Reference) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(policy.folder, device="cpu") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(pool: sglrl.Client) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve(pool, name="policy") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def prompt(policy: Reference) -> list[int]:
    ids: list[int] = policy.tokenizer(TEXT)["input_ids"]
    return ids


def check(
    policy: Reference,
    prompt: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
    top: Sequence[dict[int, float]] = (),
) -> None:
    """Compare logprobs of sampled tokens, and of the likeliest ones, with transformers'."""
    expected = policy.logprobs_of(prompt, np.array(ids))
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    rows = policy.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
    for row, found in zip(rows, top, strict=bool(top)):
        for token, logprob in found.items():
            assert abs(row[token] - logprob) < 2e-4
        likeliest = sorted(found.values())[-2:]
        np.testing.assert_allclose(likeliest, np.sort(row)[-2:], atol=2e-4)


def events_of(text: str) -> list[dict[str, Any]]:
    *lines, done = [line for line in text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("stream", [False, True])
async def test_sglang_generate(
    http: httpx.AsyncClient, policy: Reference, prompt: list[int], stream: bool
) -> None:
    for given in ({"text": TEXT}, {"input_ids": prompt}):
        asked = {
            **given, "stream": stream, "return_logprob": True, "top_logprobs_num": 2,
            "return_text_in_logprobs": True,
            "sampling_params": {"n": 2, "max_new_tokens": 12, "sampling_seed": 5},
        }  # fmt: skip
        answer = await http.post("/generate", json=asked)
        if stream:
            rows = [row for row in events_of(answer.text) if row["meta_info"]["finish_reason"]]
            rows.sort(key=lambda row: row["index"])
        else:
            rows = answer.json()
        assert rows[0]["output_ids"] != rows[1]["output_ids"]
        for row in rows:
            meta = row["meta_info"]
            ids = row["output_ids"]
            assert row["text"] == policy.tokenizer.decode(ids, skip_special_tokens=True)
            assert meta["prompt_tokens"] == len(prompt)
            logprobs, tokens, texts = zip(*meta["output_token_logprobs"], strict=True)
            assert list(tokens) == ids
            assert list(texts) == [policy.tokenizer.decode([token]) for token in ids]
            top = [
                {token: logprob for logprob, token, _ in found}
                for found in meta["output_top_logprobs"]
            ]
            check(policy, prompt, ids, logprobs, top)


async def test_greedy_tokens(http: httpx.AsyncClient, policy: Reference, prompt: list[int]) -> None:
    greedy = policy.greedy(prompt, 20)
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    made = (await http.post("/generate", json={"text": TEXT, "sampling_params": params})).json()
    assert made["output_ids"] == greedy
    again = (await http.post("/generate", json={"text": TEXT, "sampling_params": params})).json()
    assert again["meta_info"]["cached_tokens"] > 0
    params = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    asked: Any = {"token_ids": prompt, "sampling_params": params}
    made = (await http.post("/inference/v1/generate", json=asked)).json()
    assert made["choices"][0]["token_ids"] == greedy
    text = policy.tokenizer.decode(greedy, skip_special_tokens=True)
    stop = text[-2:]
    assert len(stop) == 2
    asked = {"model": "policy", "prompt": TEXT, "stop": stop, "echo": True, **params}
    made = (await http.post("/v1/completions", json=asked)).json()
    assert made["choices"][0]["text"] == TEXT + text.partition(stop)[0]
    assert made["choices"][0]["finish_reason"] == "stop"
    asked = {"text": TEXT, "sampling_params": {"temperature": 0, "stop": stop}}
    meta = (await http.post("/generate", json=asked)).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}


@pytest.mark.parametrize("stream", [False, True])
async def test_vllm_generate(
    http: httpx.AsyncClient, policy: Reference, prompt: list[int], stream: bool
) -> None:
    asked = {
        "token_ids": prompt, "stream": stream,
        "sampling_params": {"max_tokens": 12, "logprobs": 2, "seed": 3},
    }  # fmt: skip
    answer = await http.post("/inference/v1/generate", json=asked)
    if stream:
        parts = [event["choices"][0] for event in events_of(answer.text)]
    else:
        parts = answer.json()["choices"]
    ids = [token for part in parts for token in part["token_ids"]]
    content = [row for part in parts for row in part["logprobs"]["content"]]
    assert [row["token_id"] for row in content] == ids
    top = [{one["token_id"]: one["logprob"] for one in row["top_logprobs"]} for row in content]
    check(policy, prompt, ids, [row["logprob"] for row in content], top)


async def test_completions(http: httpx.AsyncClient, policy: Reference, prompt: list[int]) -> None:
    url = str(http.base_url)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        for given in (TEXT, prompt):
            values: Any = {"model": "policy", "prompt": given, "max_tokens": 12, "logprobs": 2}
            values |= {"seed": 3, "extra_body": {"return_token_ids": True}}
            (choice,) = (await client.completions.create(**values)).choices
            ids = choice.token_ids  # type: ignore[attr-defined]
            assert choice.prompt_token_ids == prompt  # type: ignore[attr-defined]
            assert choice.text == policy.tokenizer.decode(ids, skip_special_tokens=True)
            assert choice.logprobs is not None
            assert choice.logprobs.tokens == [policy.tokenizer.decode([token]) for token in ids]
            check(policy, prompt, ids, choice.logprobs.token_logprobs or [])
            offsets = choice.logprobs.text_offset or []
            for at, offset in enumerate(offsets):
                before = policy.tokenizer.decode(ids[:at], skip_special_tokens=True)
                assert choice.text[:offset] == before.rstrip("\ufffd")


async def test_grammars(http: httpx.AsyncClient, policy: Reference) -> None:
    # The grammar allows white space between tokens, and a random model might write nothing else.
    decode = policy.tokenizer.decode
    size = policy.model.config.vocab_size
    spaces = [n for n in range(size) if any(char.isspace() for char in decode([n]))]
    bias = {str(number): -1e6 for number in spaces}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    texts = []
    params = {"max_new_tokens": 60, "json_schema": json.dumps(schema), "logit_bias": bias}
    made = await http.post("/generate", json={"text": TEXT, "sampling_params": params})
    texts.append(made.json()["text"])
    asked: Any = {"model": "policy", "prompt": TEXT, "max_tokens": 60, "response_format": form}
    asked["logit_bias"] = bias
    texts.append((await http.post("/v1/completions", json=asked)).json()["choices"][0]["text"])
    params = {"max_tokens": 60, "structured_outputs": {"json": schema}, "logit_bias": bias}
    asked = {"token_ids": [5], "sampling_params": params}
    made = (await http.post("/inference/v1/generate", json=asked)).json()
    ids = made["choices"][0]["token_ids"]
    back = await http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True})
    texts.append(back.json()["prompt"])
    assert {type(json.loads(text)["a"]) for text in texts} == {bool}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abort(
    http: httpx.AsyncClient, pool: sglrl.Client, policy: Reference, prompt: list[int], stream: bool
) -> None:
    """The tokens so far are those of the policy."""
    asked = {
        "text": TEXT, "rid": "x", "return_logprob": True, "stream": stream,
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    }  # fmt: skip
    running = asyncio.ensure_future(http.post("/generate", json=asked))
    async with asyncio.timeout(60):
        while (await pool.stats())[0].engine.kv_tokens < len(prompt) + 80:
            pass
    assert (await http.post("/abort_request", json={"rid": "x"})).json() == {"aborted": 1}
    answer = await running
    made = events_of(answer.text)[-1] if stream else answer.json()
    assert made["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= len(made["output_ids"]) < 1500
    logprobs, tokens, _ = zip(*made["meta_info"]["output_token_logprobs"], strict=True)
    assert list(tokens) == made["output_ids"]
    check(policy, prompt, tokens, logprobs)
    await until_idle(pool)


async def test_versions(
    http: httpx.AsyncClient, pool: sglrl.Client, policy: Reference, prompt: list[int]
) -> None:
    """A weight update within a turn: each token has the version that sampled it."""
    state = {name: value.clone() for name, value in policy.model.state_dict().items()}
    params = {"max_new_tokens": 300, "ignore_eos": True}
    asked = {"text": TEXT, "return_logprob": True, "sampling_params": params}
    running = asyncio.ensure_future(http.post("/generate", json=asked))
    async with asyncio.timeout(60):
        while (await pool.stats())[0].engine.kv_tokens < len(prompt) + 20:
            pass
    state["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    updated = await pool.update_weights(state, inflight="abort")
    made = (await running).json()
    meta = made["meta_info"]
    spans = meta["weight_versions"]
    assert meta["weight_version"] == str(updated.version)
    assert (await http.get("/model_info")).json()["weight_version"] == str(updated.version)
    assert [span["start"] for span in spans] == [0, *[span["end"] for span in spans[:-1]]]
    assert spans[-1]["end"] == len(made["output_ids"]) == 300
    assert len(spans) == 2
    logprobs = np.array([logprob for logprob, *_ in meta["output_token_logprobs"]])
    change = spans[0]["end"]
    expected = policy.logprobs_of(prompt, np.array(made["output_ids"]))
    np.testing.assert_allclose(logprobs[:change], expected[:change], atol=2e-4)
    # With these weights all tokens are equally likely.
    vocabulary = policy.model.config.vocab_size
    np.testing.assert_allclose(logprobs[change:], -np.log(vocabulary), atol=2e-4)
