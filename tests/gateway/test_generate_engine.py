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
from engine.policies import until_idle
from engine.reference import Reference
from openai.types.chat import ChatCompletion
from trl.generation import vllm_client

import sglrl
from sglrl.gateway.serve import serve
from sglrl.launching.tiny_model import make_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = "The sum of 2 and 3 is"
SHIFT = "engine.processors:Shift"


@pytest.fixture(scope="module")
def policy(models: Path) -> Reference:
    return Reference(make_model(models / "gateway-generate"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(policy: Reference) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(policy.folder, device="cpu", logit_processors=[SHIFT]) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(pool: sglrl.Client) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve(pool, name="policy") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
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


async def test_logit_processor(pool: sglrl.Client, http: httpx.AsyncClient) -> None:
    how = {"temperature": 0, "logit_processor": SHIFT, "custom_params": {"bias": 9.5}}
    made = await pool.generate(TEXT, max_new_tokens=9, ignore_eos=True, **how)
    how |= {"max_new_tokens": 9, "ignore_eos": True}
    answer = await http.post("/generate", json={"text": TEXT, "sampling_params": how})
    assert answer.json()["output_ids"] == made.output_ids.tolist()
    how["logit_processor"] = "os:system"
    answer = await http.post("/generate", json={"text": TEXT, "sampling_params": how})
    assert answer.status_code == 400
    assert "no logit processor 'os:system'" in answer.text


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


def check_prompt(
    policy: Reference, prompt: Sequence[int], found: Sequence[dict[str, Any] | None]
) -> None:
    """Compare vLLM's ``prompt_logprobs``, with two tokens at each position, with transformers."""
    assert len(found) == len(prompt)
    assert found[0] is None
    for at, row in enumerate(found[1:], 1):
        assert row is not None
        expected = policy.logprobs(list(prompt))[at - 1]
        tokens = [int(token) for token in sorted(row, key=lambda token: row[token]["rank"])]
        assert tokens[:2] == list(np.argsort(-expected, kind="stable")[:2])
        assert prompt[at] in tokens
        for token in tokens:
            assert abs(row[str(token)]["logprob"] - expected[token]) < 2e-4


async def test_logprobs_of_prompts(
    http: httpx.AsyncClient, policy: Reference, prompt: list[int]
) -> None:
    other = prompt[::-1]
    expected = [policy.logprobs_of(ids[:1], np.array(ids[1:])) for ids in (prompt, other)]
    # SGLang's.
    asked: dict[str, Any] = {
        "input_ids": [prompt, other], "return_logprob": True, "logprob_start_len": [0, 2],
        "top_logprobs_num": [0, 2], "sampling_params": {"max_new_tokens": 2, "n": 2},
    }  # fmt: skip
    rows = [row["meta_info"] for row in (await http.post("/generate", json=asked)).json()]
    for row in rows[:2]:
        (none, *logprobs), tokens, _ = zip(*row["input_token_logprobs"], strict=True)
        assert none is None
        assert list(tokens) == prompt
        np.testing.assert_allclose(logprobs, expected[0], atol=2e-4)
    for row in rows[2:]:
        (none, *logprobs), tokens, _ = zip(*row["input_token_logprobs"], strict=True)
        assert none is None
        assert list(tokens) == other[2:]
        np.testing.assert_allclose(logprobs, expected[1][2:], atol=2e-4)
        for at, top in enumerate(row["input_top_logprobs"][1:], 3):
            values = np.sort(policy.logprobs(other)[at - 1])[:-3:-1]
            np.testing.assert_allclose([logprob for logprob, *_ in top], values, atol=2e-4)
    # Logprobs alone, as slime asks a teacher for them.
    asked["sampling_params"] = {"max_new_tokens": 0, "temperature": 0}
    row, other_row = (await http.post("/generate", json=asked)).json()
    assert other_row["meta_info"]["input_top_logprobs"] == rows[2]["input_top_logprobs"]
    assert (row["output_ids"], row["text"]) == ([], "")
    assert row["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert row["meta_info"]["completion_tokens"] == 0
    found = [logprob for logprob, *_ in row["meta_info"]["input_token_logprobs"][1:]]
    np.testing.assert_allclose(found, expected[0], atol=2e-4)
    # vLLM's.
    asked = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 2}}
    made = (await http.post("/inference/v1/generate", json=asked)).json()
    check_prompt(policy, prompt, made["prompt_logprobs"])
    asked = {"model": "policy", "prompt": [prompt, other], "max_tokens": 1, "prompt_logprobs": 2}
    choices = (await http.post("/v1/completions", json=asked)).json()["choices"]
    for choice, ids in zip(choices, (prompt, other), strict=True):
        check_prompt(policy, ids, choice["prompt_logprobs"])
    # OpenAI's, as benchmarks of models use it.
    asked = {"model": "policy", "prompt": TEXT, "max_tokens": 3, "echo": True, "logprobs": 1}
    # Several tokens may have the same text.
    asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    (choice,) = (await http.post("/v1/completions", json=asked)).json()["choices"]
    found, ids = choice["logprobs"], prompt + choice["token_ids"]
    assert found["tokens"] == [f"token_id:{token}" for token in ids]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    check(policy, ids[:1], ids[1:], found["token_logprobs"][1:])
    for row, values in zip(found["top_logprobs"][1:], policy.logprobs(ids), strict=False):
        assert abs(max(row.values()) - values.max()) < 2e-4
    assert choice["text"].startswith(TEXT)
    for offset, token in zip(found["text_offset"], prompt, strict=False):
        assert choice["text"][offset:].startswith(policy.tokenizer.decode([token]))


async def test_chat_with_the_tokens_of_the_prompt(
    pool: sglrl.Client, policy: Reference, prompt: list[int]
) -> None:
    """As verifiers and prime-rl ask: with messages, and the tokens that they are."""
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    options = {"logprobs": True, "return_token_ids": True, "max_tokens": 8, "seed": 1}
    async with (
        serve(pool, name="policy") as gateway,
        gateway.session() as session,
        openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client,
    ):

        async def ask(path: str, **more: Any) -> Any:
            body = {"model": "policy", "messages": messages, **options, **more}
            headers = {"X-Session-ID": "rollout-1"}
            return await client.post(
                path, body=body, cast_to=ChatCompletion, options={"headers": headers}
            )

        first: Any = await ask("/chat/completions", ignore_eos=True)
        tokens = first.prompt_token_ids + first.choices[0].token_ids + prompt
        messages += [{"role": "assistant", "content": "?"}, {"role": "user", "content": TEXT}]
        second: Any = await ask("/chat/completions/tokens", tokens=tokens)
        assert second.prompt_token_ids == tokens
        assert second.choices[0].message.role == "assistant"
        for made in (first, second):
            (choice,) = made.choices
            logprobs = [row.logprob for row in choice.logprobs.content]
            check(policy, made.prompt_token_ids, choice.token_ids, logprobs)
        # prime-rl asks a teacher for the logprobs of all tokens.
        third: Any = await ask("/chat/completions/tokens", tokens=tokens, prompt_logprobs=True)
        found = [next(iter(row.values()))["logprob"] for row in third.prompt_logprobs[1:]]
        check(policy, tokens[:1], tokens[1:], found)
        for wrong in ({"tokens": [-1]}, {"tokens": None}, {}, {"tokens": tokens, "x": 1}):
            with pytest.raises(openai.BadRequestError):
                await ask("/chat/completions/tokens", **wrong)
    assert session.trajectory is not None
    # Both turns with tokens continue the first one, which has its loss in one of them.
    leaves = session.trajectory.leaves
    assert sorted(len(leaf.turns) for leaf in leaves) == [1, 2]
    for leaf in leaves:
        assert leaf.prompt_ids.tolist() == first.prompt_token_ids
        made = leaf.response_ids.tolist()
        assert first.prompt_token_ids + made[: len(tokens) - len(leaf.prompt_ids)] == tokens


async def test_trls_teacher(
    http: httpx.AsyncClient, policy: Reference, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's client asks a teacher for the logprobs of given tokens."""
    # It wants vLLM, which it uses only for weights.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)

    def work() -> Any:
        client = vllm_client.VLLMClient(base_url=str(http.base_url))
        return client.get_sequence_logprobs([prompt, prompt[::-1]], [2, 4], top_logprobs=3)

    found = await asyncio.to_thread(work)
    for at, (ids, start) in enumerate(((prompt, 2), (prompt[::-1], 4))):
        rows = policy.logprobs(ids)[start - 1 : -1]
        assert found["actual_token_ids"][at] == [[token] for token in ids[start:]]
        actual = [logprob for (logprob,) in found["actual_logprobs"][at]]
        np.testing.assert_allclose(actual, rows[np.arange(len(rows)), ids[start:]], atol=2e-4)
        likeliest = np.sort(rows, axis=1)[:, :-4:-1]
        np.testing.assert_allclose(found["logprobs"][at], likeliest, atol=2e-4)


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
    async with asyncio.timeout(300):
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


async def test_a_pause_that_waits(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    asked = {"text": TEXT, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    running = asyncio.ensure_future(http.post("/generate", json=asked))
    async with asyncio.timeout(300):
        while not (await pool.stats())[0].engine.running:
            pass
    paused = await http.post("/pause?mode=wait&clear_cache=true")
    later = asyncio.ensure_future(http.post("/generate", json=asked))
    assert paused.json() == {"status": "paused"}
    async with asyncio.timeout(300):
        while not (await pool.stats())[0].engine.waiting:
            pass
    assert (await pool.stats())[0].engine.running == 0
    assert not later.done()
    assert (await http.post("/resume")).json() == {"status": "resumed"}
    for answer in (await running, await later):
        assert answer.json()["meta_info"]["completion_tokens"] == 300


async def test_versions(
    http: httpx.AsyncClient, pool: sglrl.Client, policy: Reference, prompt: list[int]
) -> None:
    """A weight update within a turn: each token has the version that sampled it."""
    state = {name: value.clone() for name, value in policy.model.state_dict().items()}
    params = {"max_new_tokens": 300, "ignore_eos": True}
    asked = {"text": TEXT, "return_logprob": True, "sampling_params": params}
    running = asyncio.ensure_future(http.post("/generate", json=asked))
    async with asyncio.timeout(300):
        while (await pool.stats())[0].engine.kv_tokens < len(prompt) + 20:
            pass
    state["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    updated = await pool.update_weights(state, inflight="retract")
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
