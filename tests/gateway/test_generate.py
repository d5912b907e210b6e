"""SGLang's /generate and /abort_request: requests, answers, and HTTP with the fake engine."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
from engine.policies import until_idle
from hypothesis import given
from hypothesis import strategies as st
from renderers import Qwen3RendererConfig, create_renderer
from renderers.client import generate
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.errors import InvalidRequest
from sglrl.gateway.serve import Gateway, serve
from sglrl.gateway.sglang_generate import GenerateRequest, _Sampling, parse

from .made import chunk, completion
from .test_chat import JSON


def body(**fields: Any) -> GenerateRequest:
    found = fields if "input_ids" in fields else {"text": "Hi", **fields}
    return parse(json.dumps(found).encode())


def test_names_of_sglang_become_ours() -> None:
    params = {
        "sampling_seed": 3, "stop_token_ids": [5], "n": 2, "ebnf": "x", "min_new_tokens": 2,
        "temperature": None, "spaces_between_special_tokens": False, "no_stop_trim": True,
        "logit_processor": "a:B", "custom_params": {"x": 1},
    }  # fmt: skip
    (turn,) = body(sampling_params=params, rid="x", priority=2, stream=True).turns()
    assert turn.sampling == {
        "seed": 3, "stop_token_ids": [5], "ebnf": "x", "min_new_tokens": 2, "no_stop_trim": True,
        "max_new_tokens": 128, "logit_processor": "a:B", "custom_params": {"x": 1},
    }  # fmt: skip
    assert (turn.prompt, turn.choices, turn.rid, turn.priority) == ("Hi", 2, "x", 2)
    assert turn.stream is True
    # null: as many as fit the context.
    (turn,) = body(sampling_params={"max_new_tokens": None}).turns()
    assert turn.sampling == {}


def test_values_of_a_batch() -> None:
    turns = body(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"max_new_tokens": 3}, {"regex": "a"}],
        return_logprob=[True, False],
        top_logprobs_num=[2, 0],
        logprob_start_len=[1, 0],
        rid=["a", "b"],
    ).turns()
    assert [turn.prompt for turn in turns] == [[1], [2, 3]]
    wanted = [{"max_new_tokens": 3}, {"regex": "a", "max_new_tokens": 128}]
    assert [turn.sampling for turn in turns] == wanted
    assert [turn.top_logprobs for turn in turns] == [2, 0]
    assert [turn.rid for turn in turns] == ["a", "b"]
    assert [turn.rid for turn in body(text=["a", "b"], rid="x").turns()] == ["x_0", "x_1"]
    assert len({turn.rid for turn in body(text=["a", "b"]).turns()}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": None}, "give either text or input_ids"),
        ({"input_ids": [1], "text": "a"}, "give either text or input_ids"),
        ({"text": [1, 2]}, "text has the wrong type: use input_ids"),
        ({"input_ids": ["a"]}, "input_ids has the wrong type: use text"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"sampling_params": {"n": 0}}, "n must be in 1..128"),
        ({"sampling_params": {"top_pp": 1}}, "'top_pp' is not supported; did you mean 'top_p'?"),
        ({"sampling_params": {"voice": 1}}, "sampling_params: the field 'voice' is not supported"),
        (
            {"sampling_params": {"top_p": "x"}},
            "got `str` - at `top_p`",
        ),
        ({"sampling_params": {"custom_params": [1]}}, "got `array` - at `custom_params`"),
        ({"sampling_params": {"logit_processor": 1}}, "got `int` - at `logit_processor`"),
        ({"sampling_params": {"seed": 1, "sampling_seed": 2}}, "seed and sampling_seed differ"),
        ({"sampling_params": [{}, {}]}, "there are 1 prompts and 2 sampling_params"),
        (
            {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
            "n must be the same in all sampling_params",
        ),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid must be text or 2 different texts"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid must be text or 2 different texts"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "1 values of return_logprob"),
        (
            {"return_logprob": True, "logprob_start_len": 0, "stream": True},
            "logprob_start_len needs stream=false",
        ),
        ({"return_logprob": True, "logprob_start_len": -2}, "must be at least -1, got -2"),
        ({"top_logprobs_num": 2}, "top_logprobs_num needs return_logprob=true"),
        ({"lora_path": ["x", "y"]}, "there are 1 prompts and 2 values of lora_path"),
        ({"image_data": ["x"]}, "the field 'image_data' is not supported"),
        ({"input_embeds": [[0.5]]}, "'input_embeds' is not supported; use text or input_ids"),
        ({"return_hidden_states": True}, "is not supported; use Client.generate"),
        ({"routed_experts_start_len": 2}, "needs return_routed_experts=true"),
        ({"return_routed_experts": True, "routed_experts_start_len": -1}, "must not be negative"),
        ({"return_sampling_mask": True}, "is not supported; use Client.generate"),
        ({"token_ids_logprob": [3]}, "token_ids_logprob needs return_logprob=true"),
        (
            {"token_ids_logprob": [3], "return_logprob": True, "logprob_start_len": 0},
            "token_ids_logprob needs logprob_start_len=-1",
        ),
        (
            {"token_ids_logprob": [3, [4]], "return_logprob": True},
            "token_ids_logprob has token ids beside lists",
        ),
        (
            {"token_ids_logprob": [[3], [4]], "return_logprob": True},
            "there are 1 prompts and 2 values of token_ids_logprob",
        ),
        ({"custom_logit_processor": "x"}, "is not supported; use logit_processor in sampling"),
        ({"session_params": {"id": "x"}}, "use a session of the gateway"),
    ],
)
def test_a_field_is_honoured_or_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        body(**fields).turns()
    assert message in str(error.value)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    fields: Any = {"lora_path": "", "return_routed_experts": False, "image_data": None}
    fields |= {"routed_experts_start_len": 0, "logprob_start_len": 0, "log_metrics": True}
    assert len(body(**fields, return_hidden_states=False).turns()) == 1
    assert len(body(input_ids=[1, 2], return_logprob=True, logprob_start_len=2).turns()) == 1


@given(st.dictionaries(st.sampled_from([*GenerateRequest.__struct_fields__, "other"]), JSON))
def test_any_fields_are_parsed_or_rejected(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        body(**fields).turns()


@given(st.dictionaries(st.sampled_from([*_Sampling.__struct_fields__, "other"]), JSON))
def test_any_sampling_params_are_parsed_or_rejected(params: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        body(sampling_params=params).turns()


# --- answers --------------------------------------------------------------------------------------


def test_an_answer() -> None:
    request = body(rid="x", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    made = request.answer("tiny", "").whole([completion([0, 3], top=2, cached=1)])
    assert made["text"] == "ad"
    assert made["output_ids"] == [0, 3]
    assert made["meta_info"] == {
        "id": "x",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": "0",
        "weight_versions": [{"version": 0, "start": 0, "end": 2}],
        "e2e_latency": 2.0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[0.0, 0, "a"], [-1.5, 3, "d"]],
        "output_token_logprobs_length": 2,
        "input_top_logprobs": [],
        "output_top_logprobs": [[[-0.25, 0, "a"], [-0.5, 1, "b"]]] * 2,
    }


def test_logprobs_without_text() -> None:
    made = body(return_logprob=True).answer("tiny", "").whole([completion([3])])
    assert made["meta_info"]["output_token_logprobs"] == [[-1.5, 3, None]]
    assert "output_top_logprobs" not in made["meta_info"]
    assert (
        "output_token_logprobs"
        not in (body().answer("tiny", "").whole([completion([3])])["meta_info"])
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"finish": "stop", "stop_match": 5}, {"type": "stop", "matched": 5}),
        ({"finish": "stop", "stop_match": "d"}, {"type": "stop", "matched": "d"}),
        ({"finish": "abort"}, {"type": "abort", "message": "Aborted"}),
    ],
)
def test_reasons(fields: dict[str, Any], reason: dict[str, Any]) -> None:
    made = body().answer("tiny", "").whole([completion([0, 3], **fields)])
    assert made["meta_info"]["finish_reason"] == reason


def test_the_weight_version_is_the_last_one() -> None:
    chunks = [chunk([0], version=4), chunk([1], version=5), chunk([], finish="abort", version=6)]
    meta = body().answer("tiny", "").whole([completion([], chunks=chunks)])["meta_info"]
    assert meta["weight_version"] == "5"
    meta = body().answer("tiny", "").whole([completion([], chunks=chunks[2:])])["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"]) == ("6", [])


def test_when_the_answer_is_a_list() -> None:
    one, four = [completion([0])], [completion([at]) for at in range(4)]
    assert body(text=["a"], rid="x").answer("tiny", "").whole(one)[0]["meta_info"]["id"] == "x"
    made = body(text=["a", "b"], rid="x", sampling_params={"n": 2}).answer("tiny", "").whole(four)
    ids = [row["meta_info"]["id"] for row in made]
    assert ids == ["x_0_0", "x_0_1", "x_1_0", "x_1_1"]
    assert [row["text"] for row in made] == ["a", "b", "c", "d"]
    made = body(sampling_params={"n": 2}).answer("tiny", "").whole(four[:2])
    assert [row["text"] for row in made] == ["a", "b"]


def test_prompt_tokens_are_returned() -> None:
    made = body(return_prompt_token_ids=True).answer("tiny", "").whole([completion([0])])
    assert made["prompt_token_ids"] == [7, 8]


# --- with the fake engine, which repeats the prompt -----------------------------------------------

module = pytest.mark.asyncio(loop_scope="module")
SLOW = {"text": "Hello", "sampling_params": {"max_new_tokens": 3000}}
"""Takes six seconds."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "tiny",
        engine="fake",
        step_seconds=0.002,
        tokens_per_step=1,
        enable_return_routed_experts=True,
    ) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name="tiny") as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=300) as http:
        yield http


async def until_running(pool: sglrl.Client, http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(300):
        while sum(worker.load for worker in pool.workers) < count:
            assert (await http.get("/health")).status_code == 200


async def read(lines: AsyncIterator[str], tokens: int) -> dict[str, Any]:
    """Read a stream. Return the first event with at least ``count`` tokens."""
    async for line in lines:
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if len(event["output_ids"]) >= tokens:
                return event
    raise AssertionError("the stream has ended")


@module
async def test_text_and_tokens(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    prompt = pool.tokenizer("Hello")["input_ids"]
    params = {"max_new_tokens": 6}
    for asked in ({"text": "Hello"}, {"input_ids": prompt}):
        made = (await http.post("/generate", json={**asked, "sampling_params": params})).json()
        assert made["output_ids"] == (prompt * 2)[:6]
        assert made["text"] == pool.tokenizer.decode(made["output_ids"])
        assert made["meta_info"]["prompt_tokens"] == len(prompt)
    two = {"input_ids": [prompt, [5]], "sampling_params": [params, {"max_new_tokens": 2}]}
    rows = (await http.post("/generate", json=two)).json()
    assert [row["output_ids"] for row in rows] == [(prompt * 2)[:6], [5, 5]]
    default = (await http.post("/generate", json={"text": "a"})).json()
    assert default["meta_info"]["completion_tokens"] == 128


@module
async def test_logprobs_of_given_tokens(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    asked = {
        "input_ids": [[5, 6], [7]],
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "token_ids_logprob": [[9, 5], None],
    }
    rows = (await http.post("/generate", json=asked)).json()
    direct = await pool.generate(input_ids=[5, 6], max_new_tokens=3, token_ids_logprob=[9, 5])
    assert direct.token_ids_logprobs is not None
    assert rows[0]["meta_info"]["output_token_ids_logprobs"] == [
        [[logprob, id_, None] for logprob, id_ in zip(row, [9, 5], strict=True)]
        for row in direct.token_ids_logprobs.tolist()
    ]
    assert "output_token_ids_logprobs" not in rows[1]["meta_info"]


@module
@pytest.mark.parametrize("stream", [False, True])
async def test_routed_experts(http: httpx.AsyncClient, pool: sglrl.Client, stream: bool) -> None:
    wanted = {"sampling_params": {"max_new_tokens": 3}, "return_routed_experts": True}
    asked = {"input_ids": [5, 6], "stream": stream, "routed_experts_start_len": 1, **wanted}
    answer = await http.post("/generate", json=asked)
    last = answer.text.split("\n\n")[-3].removeprefix("data: ") if stream else answer.text
    info = json.loads(last)["meta_info"]
    direct = await pool.generate(input_ids=[5, 6], max_new_tokens=3, return_routed_experts=True)
    assert direct.routed_experts is not None
    rows = np.frombuffer(base64.b64decode(info["routed_experts"]), np.int32)
    assert rows.tolist() == direct.routed_experts[1:].flatten().tolist()


@module
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_routed_experts_of_openai(
    http: httpx.AsyncClient, pool: sglrl.Client, path: str, stream: bool
) -> None:
    asked = {"max_tokens": 3, "return_routed_experts": True, "stream": stream}
    asked |= {"return_token_ids": True, "routed_experts_start_len": 1}
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    if path == "/v1/completions":
        asked["prompt"] = [5, 6]
    else:
        asked["messages"] = [{"role": "user", "content": "Hello"}]
    answer = await http.post(path, json={**asked, "model": "tiny"})
    if stream:
        *events, usage, _ = answer.text.removesuffix("\n\n").split("\n\n")
        *_, tokens, last = [json.loads(event.removeprefix("data: ")) for event in events]
        assert (last["choices"], "usage" in usage) == ([], True)
        prompt = tokens["choices"][0]["prompt_token_ids"]
    else:
        last = answer.json()
        prompt = (last if "prompt_token_ids" in last else last["choices"][0])["prompt_token_ids"]
    direct = await pool.generate(input_ids=prompt, max_new_tokens=3, return_routed_experts=True)
    assert direct.routed_experts is not None
    assert last["sglext"]["routed_experts_start_len"] == 1
    rows = np.frombuffer(base64.b64decode(last["sglext"]["routed_experts"]), np.int32)
    assert rows.tolist() == direct.routed_experts[1:].flatten().tolist()


@module
@pytest.mark.parametrize("stream", [False, True])
async def test_routed_experts_of_vllm(
    http: httpx.AsyncClient, gateway: Gateway, pool: sglrl.Client, stream: bool
) -> None:
    """Clients such as verifiers ask only for the rows after their last turn."""
    async with gateway.session() as session:
        prompt, start = [5, 6], 0
        for _ in range(2):
            params = {"max_tokens": 3, "n": 2, "routed_experts_prompt_start": start}
            answer = await http.post(
                "/inference/v1/generate",
                json={"token_ids": prompt, "sampling_params": params, "stream": stream},
                headers={"Authorization": f"Bearer {session.api_key}"},
            )
            if stream:
                *events, _ = answer.text.removesuffix("\n\n").split("\n\n")
                parts = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
                choices = [one for one in parts if one["finish_reason"]]
            else:
                choices = answer.json()["choices"]
                # The client finds the data by this text.
                assert '"routed_experts":{"data":"' in answer.text
            direct = await pool.generate(
                input_ids=prompt, max_new_tokens=3, return_routed_experts=True
            )
            assert direct.routed_experts is not None
            assert len(choices) == 2
            for choice in choices:
                given = choice["routed_experts"]
                rows = np.frombuffer(base64.b64decode(given["data"]), given["dtype"])
                rows = rows.reshape(given["shape"])
                assert rows.tolist() == direct.routed_experts[start:].tolist()
                assert given["start"] == start
            prompt = [*prompt, *direct.output_ids.tolist()]
            prompt, start = [*prompt, 9], len(prompt) - 1
    assert session.trajectory is not None
    kept = session.trajectory.routed_experts
    assert kept is not None
    assert len(kept) == len(session.trajectory.input_ids) - 1


@module
async def test_the_client_of_verifiers(
    gateway: Gateway, pool: sglrl.Client, tmp_path: Path
) -> None:
    """It calls ``renderers.client.generate``. Each turn after the first goes on with its tokens."""
    tokenizer = family_tokenizer(tmp_path, FAMILIES["qwen3"])
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    rows: list[list[Any]] = []
    size, tokens = 0, list[int]()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as client:
        for role in ("user", "tool", "tool"):
            ask = [{"role": role, "content": "Hello"}]
            start = max(0, len(tokens) - 1)
            # The engine repeats the prompt. Its first message ends as an answer does.
            first = renderer.render_ids([{"role": "user", "content": "Hello"}])
            end = renderer.get_stop_token_ids()[0]
            params: dict[str, Any] = {"max_tokens": first.index(end) + 1}
            bridged = None
            if tokens:
                bridged = renderer.bridge_to_next_turn(tokens[:size], tokens[size:], ask).token_ids
                params["routed_experts_prompt_start"] = start
            made = await generate(
                client=client, renderer=renderer, messages=ask, model="tiny",
                prompt_ids=bridged, sampling_params=params,
            )  # fmt: skip
            assert made["completion_ids"][-1] == end
            assert len(made["completion_logprobs"]) == len(made["completion_ids"])
            size, tokens = len(made["prompt_ids"]), made["prompt_ids"] + made["completion_ids"]
            payload = made["routed_experts"]
            assert payload["start"] == start
            array = np.frombuffer(binascii.a2b_base64(payload["data"]), payload["dtype"])
            rows = rows[:start] + array.reshape(payload["shape"]).tolist()
            assert len(rows) == len(tokens) - 1
    whole = await pool.generate(input_ids=tokens, max_new_tokens=1, return_routed_experts=True)
    assert whole.routed_experts is not None
    assert whole.routed_experts[: len(rows)].tolist() == rows


@module
async def test_routed_experts_of_a_session(gateway: Gateway, pool: sglrl.Client) -> None:
    """A later turn brings the rows that no earlier turn has. All are in the trajectory."""
    async with gateway.session() as session, httpx.AsyncClient() as http:
        ends, messages = [], []
        for text in ("Hello", "Again"):
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "return_routed_experts": True, "max_tokens": 3}
            answer = await http.post(f"{session.base_url}/chat/completions", json=body)
            made = answer.json()
            messages.append(made["choices"][0]["message"])
            extension = made["sglext"]
            rows = np.frombuffer(base64.b64decode(extension["routed_experts"]), np.int32)
            ends.append((extension["routed_experts_start_len"], rows))
    assert session.trajectory is not None
    kept = session.trajectory.routed_experts
    assert kept is not None
    assert ends[0][0] == 0
    assert 0 < ends[1][0] == len(ends[0][1]) // kept[0].size
    assert np.concatenate([rows for _, rows in ends]).tolist() == kept.flatten().tolist()


@module
async def test_a_stream(http: httpx.AsyncClient) -> None:
    asked = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": {"max_new_tokens": 300}}
    events = []
    async with http.stream("POST", "/generate", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(events) > 5
    for event in events:
        count = event["meta_info"]["completion_tokens"]
        assert event["output_ids"] == ([5, 6, 7] * 100)[:count]
        assert event["meta_info"]["prompt_tokens"] == 3
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 300}


@module
async def test_errors(http: httpx.AsyncClient) -> None:
    for asked, status, message in (
        ({"text": ""}, 400, "the prompt is empty"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, 400, "at least 0, got -1"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, 400, "=0 needs return_logprob"),
        ({"input_ids": [-1]}, 400, "token id -1 is outside"),
        ({"input_ids": [1] * 40_000}, 400, "is longer than the model's context length"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, 400, "temperature must be in"),
    ):
        for stream in (False, True):
            answer = await http.post("/generate", json={**asked, "stream": stream})  # type: ignore[dict-item]
            assert answer.status_code == status
            error = answer.json()["error"]
            assert message in error["message"]
            assert error["code"] == status
    scoring = {"return_logprob": True, "logprob_start_len": 0, "input_ids": [-1]}
    asked = {**scoring, "sampling_params": {"max_new_tokens": 0}}
    answer = await http.post("/generate", json=asked)
    assert "token id -1 is outside" in answer.json()["error"]["message"]
    missing = await http.post("/sessions/none/generate", json={"text": "a"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, 404)


@module
async def test_an_abort_returns_the_tokens_so_far(
    http: httpx.AsyncClient, pool: sglrl.Client
) -> None:
    await until_idle(pool)
    first = asyncio.ensure_future(http.post("/generate", json={**SLOW, "rid": "first"}))
    other = asyncio.ensure_future(
        http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 400}})
    )
    await until_running(pool, http, 2)
    begun = {**SLOW, "rid": "stream", "stream": True, "return_logprob": True}
    async with http.stream("POST", "/generate", json=begun) as answer:
        lines = aiter(answer.aiter_lines())
        event = await read(lines, 40)
        found = await http.post("/abort_request", json={"rid": "stream"})
        assert found.json() == {"aborted": 1}
        *_, last, done = [line async for line in lines if line]
        assert done == "data: [DONE]"
        ended = json.loads(last.removeprefix("data: "))
    assert ended["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
    assert len(event["output_ids"]) <= len(ended["output_ids"]) < 3000
    assert len(ended["meta_info"]["output_token_logprobs"]) == len(ended["output_ids"])
    # Without a stream, workers report some of the tokens.
    assert (await http.post("/abort_request", json={"rid": "first"})).json() == {"aborted": 1}
    made = (await first).json()
    assert made["meta_info"]["finish_reason"]["type"] == "abort"
    hello = pool.tokenizer("Hello")["input_ids"]
    count = len(made["output_ids"])
    assert 16 <= count < 3000
    assert made["output_ids"] == (hello * 1000)[:count]
    assert made["meta_info"]["prompt_tokens"] == len(hello)
    # No other request is aborted.
    assert (await other).json()["meta_info"]["finish_reason"]["type"] == "length"
    assert (await http.post("/abort_request", json={"rid": "first"})).json() == {"aborted": 0}
    await until_idle(pool)


@module
async def test_an_abort_within_a_batch(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    params = [{"max_new_tokens": 3000}, {"max_new_tokens": 100}]
    asked = {"text": ["a", "b"], "rid": ["p", "q"], "sampling_params": params}
    batch = asyncio.ensure_future(http.post("/generate", json=asked))
    await until_running(pool, http, 2)
    assert (await http.post("/abort_request", json={"rid": "p"})).json() == {"aborted": 1}
    one, two = (await batch).json()
    assert one["meta_info"]["finish_reason"]["type"] == "abort"
    assert two["meta_info"]["finish_reason"] == {"type": "length", "length": 100}
    await until_idle(pool)


@module
async def test_all_are_aborted(
    http: httpx.AsyncClient, pool: sglrl.Client, gateway: Gateway
) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3000}
    tokens = {"token_ids": [1], "sampling_params": {"max_tokens": 3000}, "request_id": "v"}
    posts = [
        ("/generate", {**SLOW, "sampling_params": {"n": 2, "max_new_tokens": 3000}}),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 3000}),
        ("/inference/v1/generate", tokens),
        ("/v1/chat/completions", ask),
    ]
    async with gateway.session() as session:
        running = [
            asyncio.ensure_future(http.post(path, json=asked))
            for path, asked in [*posts, (f"{session.base_url}/chat/completions", ask)]
        ]
        await until_running(pool, http, 6)
        assert (await http.post("/abort_request", json={"rid": "x"})).json() == {"aborted": 0}
        # The key of a session aborts only its requests.
        own = {"authorization": f"Bearer {session.api_key}"}
        for headers, count in ((own, 1), ({}, 4), ({}, 0)):
            made = await http.post("/abort_request", json={"abort_all": True}, headers=headers)
            assert made.json() == {"aborted": count}
        *alone, of_session = await asyncio.gather(*running)
    # OpenAI's client would send it again after a status of 500 or more.
    assert (of_session.status_code, "the request was aborted" in of_session.text) == (400, True)
    two, *rest = [answer.json() for answer in alone]
    assert [row["meta_info"]["finish_reason"]["type"] for row in two] == ["abort"] * 2
    assert [row["choices"][0]["finish_reason"] for row in rest] == ["abort"] * 3
    assert session.trajectory is None
    await until_idle(pool)


@module
async def test_a_request_without_its_client(http: httpx.AsyncClient, pool: sglrl.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post(
            "/generate", json={**SLOW, "rid": "x"}, timeout=httpx.Timeout(300, read=0.2)
        )
    await until_idle(pool)
    assert (await http.post("/abort_request", json={"rid": "x"})).json() == {"aborted": 0}


@module
async def test_other_endpoints_of_sglang(
    http: httpx.AsyncClient, pool: sglrl.Client, gateway: Gateway
) -> None:
    for path in ("/model_info", "/get_model_info"):
        info = (await http.get(path)).json()
        assert info["model_path"] == info["tokenizer_path"] == pool.info.model
        assert info["weight_version"] == "0"
    models = (await http.get("/v1/models")).json()["data"]
    assert [model["max_model_len"] for model in models] == [pool.info.max_total_tokens]
    for asked in ({}, {"rid": ""}, {"rid": 3}, {"other": 1}):
        answer = await http.post("/abort_request", json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
    await until_idle(pool)
    assert (await http.post("/flush_cache")).json() == {"success": True}
    running = asyncio.ensure_future(http.post("/generate", json=SLOW))
    await until_running(pool, http, 1)
    busy = await http.post("/flush_cache")
    assert (busy.status_code, busy.json()) == (400, {"success": False})
    await http.post("/abort_request", json={"abort_all": True})
    await running
    async with gateway.session() as session:
        own = {"authorization": f"Bearer {session.api_key}"}
        assert (await http.post("/flush_cache", headers=own)).status_code == 403
