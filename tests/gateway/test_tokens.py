"""vLLM's token endpoints: /inference/v1/generate, /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

import sglrl
from sglrl.errors import InvalidRequest
from sglrl.gateway.serve import serve
from sglrl.gateway.vllm_generate import TokenRequest, _Sampling, parse

from .made import completion
from .test_chat import JSON
from .test_generate import until_running

module = pytest.mark.asyncio(loop_scope="module")


def body(params: Any = None, **fields: Any) -> TokenRequest:
    found = {"token_ids": [7, 8], "sampling_params": {} if params is None else params, **fields}
    return parse(json.dumps(found).encode())


def test_names_of_vllm_become_ours() -> None:
    params = {
        "max_tokens": 9, "min_tokens": 2, "n": 3, "seed": 4, "top_k": 0, "logprobs": 5,
        "include_stop_str_in_output": True, "ignore_eos": True, "detokenize": False,
        "extra_args": {"prl_compact_logprobs": True}, "structured_outputs": {"grammar": "g"},
    }  # fmt: skip
    (turn,) = body(params, request_id="x", priority=3, cache_salt="s", stream=True).turns()
    assert turn.sampling == {
        "max_new_tokens": 9, "min_new_tokens": 2, "seed": 4, "top_k": -1, "no_stop_trim": True,
        "ignore_eos": True, "ebnf": "g",
    }  # fmt: skip
    assert (turn.prompt, turn.choices, turn.top_logprobs, turn.rid) == ([7, 8], 3, 5, "x")
    # vLLM samples the lowest number first.
    assert (turn.priority, turn.stream) == (-3, True)
    (turn,) = body({"seed": -1, "structured_outputs": {"json_object": True}}).turns()
    assert turn.sampling == {"json_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("params", "fields", "message"),
    [
        ({}, {"token_ids": None}, "Expected `array`"),
        ({}, {"token_ids": ["a"]}, "Expected `int`, got `str`"),
        ({}, {"features": {"mm_hashes": {}}}, "'features' is not supported; use token_ids"),
        ({}, {"kv_transfer_params": {"a": 1}}, "'kv_transfer_params' is not supported"),
        ({}, {"output_mode": "text"}, "'output_mode' is not supported; use POST /v1/completions"),
        ({"max_tokens": 0}, {}, "max_tokens must be at least 1"),
        ({"n": 200}, {}, "n must be in 1..128"),
        ({"logprobs": -1}, {}, "logprobs=-1 is not supported"),
        ({"prompt_logprobs": 1}, {"stream": True}, "prompt_logprobs needs stream=false"),
        ({"routed_experts_prompt_start": -1}, {}, "must be a position of the prompt, got -1"),
        ({"routed_experts_prompt_start": 2}, {}, "must be a position of the prompt, got 2"),
        ({"bad_words": ["x"]}, {}, "sampling_params: the field 'bad_words' is not supported"),
        ({"extra_args": {"x": 1}}, {}, "sampling_params: the field 'extra_args' is not supported"),
        ({"voice": 1}, {}, "sampling_params: the field 'voice' is not supported"),
        ([], {}, "Expected `object`, got `array`"),
    ],
)
def test_a_field_is_honoured_or_rejected(params: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        body(params, **fields).turns()
    assert message in str(error.value)


@given(
    st.dictionaries(st.sampled_from([*TokenRequest.__struct_fields__, "other"]), JSON),
    st.dictionaries(st.sampled_from([*_Sampling.__struct_fields__, "other"]), JSON),
)
def test_any_fields_are_parsed_or_rejected(fields: Any, params: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        body(**{"params": params, **fields}).turns()


def test_an_answer() -> None:
    request = body({"logprobs": 2}, request_id="x", return_token_ids=True)
    made = request.answer("tiny", "").whole([completion([1, 3], top=2, cached=1)])
    head = {"request_id": "x", "model": "tiny", "output_mode": "tokens"}
    assert {name: made[name] for name in head} == head
    assert made["prompt_token_ids"] == [7, 8]
    assert made["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    (choice,) = made["choices"]
    content = choice.pop("logprobs")["content"]
    assert choice == {
        "index": 0,
        "token_ids": [1, 3],
        "finish_reason": "length",
        "stop_reason": None,
        "weight_versions": [{"version": 0, "start": 0, "end": 2}],
        "routed_experts": None,
    }

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {
            "token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": rank,
            "bytes": None,
        }  # fmt: skip

    # The sampled token is the first of the likeliest, once.
    sampled, others = entry(1, -0.5, 2), [entry(0, -0.25, 1)]
    assert content[0] == {**sampled, "top_logprobs": [sampled, *others]}
    sampled, others = entry(3, -1.5, None), [entry(0, -0.25, 1), entry(1, -0.5, 2)]
    assert content[1] == {**sampled, "top_logprobs": [sampled, *others]}
    (choice,) = body().answer("tiny", "").whole([completion([1])])["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("match", "reason"), [(5, 5), (6, None), ("b", "b"), (None, None)], ids=str
)
def test_the_reason_of_a_stop(match: Any, reason: Any) -> None:
    """Of the tokens, only those of the client are a reason."""
    answer = body({"stop_token_ids": [5]}).answer("tiny", "")
    (choice,) = answer.whole([completion([1], finish="stop", stop_match=match)])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


# --- with the fake engine, which repeats the prompt -----------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", step_seconds=0.002, tokens_per_step=1) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(pool: sglrl.Client) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serve(pool, name="tiny") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
    ):
        yield http


@module
async def test_tokens_in_and_out(http: httpx.AsyncClient) -> None:
    asked: Any = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5, "n": 2}}
    made = (await http.post("/inference/v1/generate", json=asked)).json()
    assert [choice["token_ids"] for choice in made["choices"]] == [[5, 6, 7, 5, 6]] * 2
    assert made["model"] == "tiny"
    usage = made["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 10)
    answer = await http.post("/inference/v1/generate", json={**asked, "stream": True})
    tokens: list[list[int]] = [[], []]
    *lines, done = [line for line in answer.text.split("\n\n") if line]
    for line in lines:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        tokens[choice["index"]] += choice["token_ids"]
    assert (tokens, done) == ([[5, 6, 7, 5, 6]] * 2, "data: [DONE]")


@module
async def test_without_a_limit_the_context_is_filled(
    http: httpx.AsyncClient, pool: sglrl.Client
) -> None:
    size = pool.info.max_total_tokens
    asked = {"token_ids": [5] * (size - 4)}
    made = (await http.post("/inference/v1/generate", json=asked)).json()
    assert made["usage"]["completion_tokens"] in (3, 4)


@module
async def test_aborts(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    asked: Any = {"token_ids": [5], "sampling_params": {"max_tokens": 3000}}
    running = [
        asyncio.ensure_future(
            http.post("/inference/v1/generate", json={**asked, "request_id": name})
        )
        for name in ("a", "b", "c")
    ]
    await until_running(pool, http, 3)
    found = await http.post("/inference/v1/abort_requests", json={"request_ids": ["a", "b", "x"]})
    assert found.json() == {"aborted": 2}
    assert (await http.post("/abort_request", json={"rid": "c"})).json() == {"aborted": 1}
    for answer in await asyncio.gather(*running):
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
    wrong = await http.post("/inference/v1/abort_requests", json={"request_ids": "a"})
    assert wrong.status_code == 400


@module
async def test_tokenize(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    tokenizer = pool.tokenizer
    text = "Hé 🙂 <|im_start|>"
    for prefix in ("", "/v1"):
        made = (await http.post(f"{prefix}/tokenize", json={"prompt": text})).json()
        tokens = tokenizer(text)["input_ids"]
        assert made == {
            "count": len(tokens),
            "max_model_len": pool.info.max_total_tokens,
            "tokens": tokens,
            "token_strs": None,
        }
        back = await http.post(f"{prefix}/detokenize", json={"tokens": tokens})
        assert back.json() == {"prompt": text, "text": text}
    skips = {"tokens": tokens, "skip_special_tokens": True}
    assert (await http.post("/detokenize", json=skips)).json()["text"] == "Hé 🙂 "
    assert (await http.post("/detokenize", json={"tokens": []})).json()["text"] == ""
    named = {"prompt": text, "return_token_strs": True, "add_special_tokens": False}
    made = (await http.post("/tokenize", json=named)).json()
    assert made["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert made["token_strs"] == tokenizer.convert_ids_to_tokens(made["tokens"])


@module
async def test_tokenize_messages(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    for fields in (
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
    ):
        options: Any = {"add_generation_prompt": True, **fields}
        if "continue_final_message" in fields:
            options["add_generation_prompt"] = False
        wanted = pool.tokenizer.apply_chat_template(messages, return_dict=False, **options)
        made = (await http.post("/tokenize", json={"messages": messages, **fields})).json()
        assert (made["tokens"], made["count"]) == (wanted, len(wanted))


@module
async def test_wrong_requests(http: httpx.AsyncClient) -> None:
    for path, asked, message in (
        ("/tokenize", {}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools is for messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "has no 'content'"),
        ("/tokenize", {"messages": []}, "messages must be a non-empty list"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "'chat_template' is not supported"),
        ("/detokenize", {"tokens": [10**7]}, "token id 10000000 is outside"),
        ("/detokenize", {"tokens": "a"}, "Expected `array`"),
        ("/inference/v1/generate", {"token_ids": []}, "the prompt is empty"),
        ("/inference/v1/generate", {"token_ids": [1], "model": "gpt"}, "no model 'gpt'"),
    ):
        answer = await http.post(path, content=json.dumps(asked).encode())
        assert answer.status_code in (400, 404), asked
        assert message in answer.json()["error"]["message"]
