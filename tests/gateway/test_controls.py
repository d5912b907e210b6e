"""Endpoints of SGLang and vLLM that control the engines, and the clients that use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine.policies import until_idle, until_running
from sessions.families import FAMILIES, family_tokenizer
from torchrl.modules.llm.backends.sglang import AsyncSGLang
from trl.generation import vllm_client

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="module")
SLOW = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1000}}
"""Takes a second."""
TEXT = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    options: dict[str, Any] = {"step_seconds": 0.001, "tokens_per_step": 1, "replicas": 2}
    async with sglrl.launch("tiny", engine="fake", **options) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(client: sglrl.Client) -> AsyncIterator[Any]:
    async with sglrl.serve(client, name="tiny") as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=300) as http:
        yield http


async def test_what_engines_report(client: sglrl.Client, http: httpx.AsyncClient) -> None:
    assert (await http.get("/health_generate")).json() == {"status": "ok"}
    await until_idle(client)
    for path in ("/server_info", "/get_server_info"):
        info = (await http.get(path)).json()
        assert info["model_path"] == client.info.model
        assert (info["replicas"], info["engine_tp_size"], info["weight_version"]) == (2, 1, "0")
        assert (info["dp_size"], info["tp_size"]) == (1, 1), "for trainers, a pool is one rank"
        assert len(info["internal_states"]) == 2
        assert (info["enable_memory_saver"], info["enable_return_routed_experts"]) == (True, False)
    for path in ("/weight_version", "/get_weight_version"):
        assert (await http.get(path)).json() == {"weight_version": "0"}
    turns = [asyncio.ensure_future(http.post("/generate", json=SLOW)) for _ in range(3)]
    await until_running(client, 3)
    load = (await http.get("/get_load")).json()
    loads = (await http.get("/v1/loads")).json()["loads"]
    for rows in (load, loads):
        assert [row["dp_rank"] for row in rows] == [0, 1]
        assert sum(row["num_running_reqs"] for row in rows) == 3
        assert sum(row["num_reqs"] - row["num_waiting_reqs"] for row in rows) == 3
    for turn in turns:
        assert (await turn).status_code == 200


@pytest.mark.parametrize(
    ("pause", "body", "go_on"),
    [
        ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
        ("/pause_generation", {"mode": "retract"}, "/continue_generation"),
        ("/pause?mode=keep", None, "/resume"),
        ("/pause?mode=keep&clear_cache=False", None, "/resume"),
    ],
)
async def test_a_pause(
    client: sglrl.Client, http: httpx.AsyncClient, pause: str, body: Any, go_on: str
) -> None:
    turn = asyncio.ensure_future(http.post("/generate", json=SLOW))
    await until_running(client, 1)
    assert (await http.post(pause, json=body)).status_code == 200
    before = [stats.engine.generated_tokens for stats in await client.stats()]
    assert [stats.engine.generated_tokens for stats in await client.stats()] == before
    assert not turn.done()
    answer = await http.post(go_on, json={"torch_empty_cache": True})
    assert answer.status_code == 200
    assert (await turn).json()["meta_info"]["completion_tokens"] == 1000


async def test_sleep(client: sglrl.Client, http: httpx.AsyncClient) -> None:
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    turn = asyncio.ensure_future(http.post("/generate", json=SLOW))
    await until_running(client, 1)
    for path, body, asleep in (
        (release, None, ("kv_cache", "weights")),
        (resume, {"tags": ["weights"]}, ("kv_cache",)),
        (resume, {}, ()),
        (release, {"tags": ["weights"]}, ("weights",)),
    ):
        assert (await http.post(path, json=body)).status_code == 200
        assert {stats.engine.asleep for stats in await client.stats()} == {asleep}
    assert not turn.done()
    answer = await http.post(release, json={"tags": ["cuda_graph"]})
    assert answer.status_code == 400
    assert "tags must be of ('kv_cache', 'weights')" in answer.text
    assert (await http.post(resume)).status_code == 200
    assert (await turn).json()["meta_info"]["completion_tokens"] == 1000


@pytest.mark.parametrize("path", ["/pause_generation", "/pause"])
async def test_a_pause_that_aborts(
    client: sglrl.Client, gateway: Any, http: httpx.AsyncClient, path: str
) -> None:
    """A turn of a session goes on afterwards."""
    body = {"messages": TEXT, "max_tokens": 1000}
    async with gateway.session() as session:
        url = f"{session.base_url}/chat/completions"
        turn = asyncio.ensure_future(http.post(url, json=body))
        await until_running(client, 1)
        assert (await http.post(path)).status_code == 200
        await http.post("/resume")
        assert (await turn).json()["usage"]["completion_tokens"] == 1000


MESSAGES: dict[str, Any] = {"model": "tiny", "messages": TEXT, "max_tokens": 3000}
ABORTS = {
    "/generate": ({"input_ids": [5], "sampling_params": {"max_new_tokens": 3000}}, '"abort"'),
    "/v1/chat/completions": (MESSAGES, '"abort"'),
    "/v1/messages": (MESSAGES, '"pause_turn"'),
    "/v1/responses": ({"input": TEXT, "max_output_tokens": 3000}, '"status":"incomplete"'),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ABORTS)
async def test_a_pause_that_aborts_requests_without_a_session(
    client: sglrl.Client, http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    body, end = ABORTS[path]
    turns = [asyncio.ensure_future(http.post(path, json={**body, "stream": stream}))]
    await until_running(client, 1)
    turns.append(asyncio.ensure_future(client.generate(input_ids=[5], max_new_tokens=3000)))
    await until_running(client, 2)
    pause = "/pause_generation" if path == "/generate" else "/pause"
    assert (await http.post(pause)).status_code == 200
    # The answers come while the engines are paused.
    answer, completion = await asyncio.gather(*turns)
    assert completion.finish_reason == "abort"
    assert end in answer.text.replace(" ", "")
    assert (await http.post("/resume")).status_code == 200


async def test_what_is_rejected(gateway: Any, http: httpx.AsyncClient) -> None:
    for path, why in (
        ("/update_weights_from_tensor", "its body is a pickle"),
        ("/release_memory_occupation", "the field 'mode' is not supported"),
        ("/pause?mode=x", "mode must be one of ['abort', 'keep', 'wait'], got 'x'"),
        ("/pause?seconds=1", "'seconds' is not supported"),
        ("/pause?clear_cache=x", "clear_cache must be one of ['true', '1', 'false', '0'], got 'x'"),
        ("/pause_generation", "Invalid enum value 'x'"),
    ):
        answer = await http.post(path, json={"mode": "x"})
        assert answer.status_code == 400
        assert why in answer.text, answer.text
    async with gateway.session() as session:
        key = {"authorization": f"Bearer {session.api_key}"}
        for path in ("/pause", "/pause_generation", "/resume", "/reset_prefix_cache"):
            assert (await http.post(path, headers=key)).status_code == 403
        assert (await http.get("/server_info", headers=key)).status_code == 200


async def test_the_prefix_cache_is_kept_while_there_are_requests(
    client: sglrl.Client, http: httpx.AsyncClient
) -> None:
    turn = asyncio.ensure_future(http.post("/generate", json=SLOW))
    await until_running(client, 1)
    assert (await http.post("/reset_prefix_cache")).status_code == 400
    await turn
    await until_idle(client)
    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}


async def test_torchrls_client(client: sglrl.Client, gateway: Any) -> None:
    def work() -> Any:
        service = AsyncSGLang.connect(gateway.url)
        sampling = {"max_new_tokens": 4}
        one = service.generate(input_ids=[5, 6, 7], sampling_params=sampling, return_logprobs=True)
        two = service.generate(["One", "Two"], sampling)
        return one, two, service.flush_cache()

    one, two, flushed = await asyncio.to_thread(work)
    assert len(one["output_ids"]) == 4
    assert len(one["meta_info"]["output_token_logprobs"]) == 4
    assert [answer["meta_info"]["completion_tokens"] for answer in two] == [4, 4]
    assert flushed


async def test_trls_client(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # It wants vLLM, which it uses only for weights.
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)

    def work() -> Any:
        trl = vllm_client.VLLMClient(base_url=gateway.url)
        options = {"n": 2, "max_tokens": 4, "logprobs": 3}
        one = trl.generate(prompts=[[5, 6, 7], [8, 9]], **options)
        two = trl.chat([[{"role": "user", "content": "Hi"}]], **options)
        trl.reset_prefix_cache()
        return one, two, trl.get_world_size()

    one, two, size = await asyncio.to_thread(work)
    assert one["prompt_ids"] == [[5, 6, 7], [8, 9]]
    for made, count in ((one, 4), (two, 2)):
        assert [len(ids) for ids in made["completion_ids"]] == [4] * count
        for ids, logprobs, tokens in zip(
            made["completion_ids"], made["logprobs"], made["logprob_token_ids"], strict=True
        ):
            for token, row, known in zip(ids, logprobs, tokens, strict=True):
                assert token in known
                assert row == sorted(row, reverse=True)
                assert len(row) == len(known) >= 3
    assert size == 1


async def test_tools_of_trls_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends ``tool_choice="none"``. An argument of its method overrides that."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    tokenizer = family_tokenizer(tmp_path, FAMILIES["qwen3"])
    ask = [{"role": "user", "content": "Hi"}]
    add = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}

    def work(url: str, **choice: Any) -> list[int]:
        trl = vllm_client.VLLMClient(base_url=url)
        made = trl.chat([ask], tools=[add], max_tokens=2, logprobs=0, generation_kwargs=choice)
        (ids,) = made["prompt_ids"]
        return ids  # type: ignore[no-any-return]

    async with (
        sglrl.launch(str(tmp_path), engine="fake") as client,
        sglrl.serve(client) as gateway,
    ):
        hidden = await asyncio.to_thread(work, gateway.url)
        shown = await asyncio.to_thread(work, gateway.url, tool_choice="auto")
    for ids, tools in ((hidden, None), (shown, [add])):
        expected = tokenizer.apply_chat_template(
            ask, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert ids == expected


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/init_weights_update_group", {"master_port": -1}),
        ("/init_weights_update_group", {"master_port": 70_000}),
        ("/init_weights_update_group", {"master_port": "1e3"}),
        ("/init_weights_update_group", {"master_port": "99999"}),
        ("/init_weights_update_group", {"world_size": 2**31}),
        ("/update_weights_from_disk", {"weight_version": "9" * 5000}),
    ],
)
async def test_numbers_out_of_range(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    base: dict[str, Any] = {"model_path": "/x"}
    if path == "/init_weights_update_group":
        base = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    answer = await http.post(path, json={**base, **fields})
    assert answer.status_code == 400
    assert next(iter(fields)) in answer.json()["message"]
