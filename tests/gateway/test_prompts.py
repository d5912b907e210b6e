"""Text and token ids, instead of messages, in a session."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine.policies import until_running

import sglrl
from sglrl.gateway.conversations import Conversations
from sglrl.gateway.dialect import TurnRequest
from sglrl.inference.requests import Requests
from sglrl.sessions.session import Session
from sglrl.sessions.session_spec import SessionSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    options: dict[str, Any] = {"step_seconds": 0.001, "tokens_per_step": 1}
    async with sglrl.launch("tiny", engine="fake", **options) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(client: sglrl.Client) -> AsyncIterator[Any]:
    async with sglrl.serve(client, name="tiny") as gateway:
        yield gateway


async def test_a_prompt_that_begins_with_a_turn_continues_it(gateway: Any) -> None:
    async with gateway.session() as session, httpx.AsyncClient(timeout=300) as http:
        base = session.base_url.removesuffix("/v1")

        async def completions(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 3, "return_token_ids": True}
            answer = await http.post(f"{session.base_url}/completions", json=body)
            found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
            return found

        async def native(prompt: list[int]) -> list[int]:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3}}
            answer = await http.post(f"{base}/generate", json=body)
            found: list[int] = answer.raise_for_status().json()["output_ids"]
            return found

        async def tokens_in(prompt: list[int]) -> list[int]:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 3}}
            answer = await http.post(f"{base}/inference/v1/generate", json=body)
            found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
            return found

        ids = [5, 6, 7]
        starts = []
        for ask in (completions, native, tokens_in):
            starts.append(len(ids))
            ids = [*ids, *await ask(ids), 9]
        await native([5, 6, 8])
        await session.reward(1.0)
    assert session.trajectory is not None
    other, one = session.trajectory, session.trajectory.branches[0]
    assert one.input_ids.tolist() == ids[:-1]
    assert [len(one.prompt_ids) + turn.start for turn in one.turns] == starts
    assert other.prompt_ids.tolist() == [5, 6, 8]
    assert (one.reward, other.reward) == (0.0, 1.0)


async def test_text_and_several_prompts(gateway: Any) -> None:
    async with gateway.session() as session, httpx.AsyncClient(timeout=300) as http:
        body = {"prompt": ["One", "two three"], "n": 2, "max_tokens": 3}
        answer = await http.post(f"{session.base_url}/completions", json=body)
        assert len(answer.raise_for_status().json()["choices"]) == 4
        body = {"prompt": "One", "stream": True, "max_tokens": 3}
        answer = await http.post(f"{session.base_url}/completions", json=body)
        assert answer.raise_for_status().text.endswith("data: [DONE]\n\n")
    assert session.trajectory is not None
    assert [leaf.sampled_tokens for leaf in session.trajectory.leaves] == [3] * 5


async def test_each_request_has_its_own_priority(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that continues a conversation."""
    real, priorities = Requests.sample, []

    def sample(self: Requests, *args: Any, **kwargs: Any) -> Any:
        call, future = real(self, *args, **kwargs)
        priorities.append(call.priority)
        return call, future

    monkeypatch.setattr(Requests, "sample", sample)
    session = Session(SessionSpec(client.requests))
    conversations = Conversations(session)
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    for number, priority in enumerate((3, 3, 5, 0)):
        asked = TurnRequest(
            messages=messages, priority=priority, sampling={"max_new_tokens": 2, "seed": number}
        )
        turn = conversations.sample([asked], bytes([number]), False, True, lambda *new: None)
        (made,) = await turn.result()
        messages = [*messages, made.message.as_dict(), messages[0]]
    assert priorities == [3, 3, 5, 0]
    assert len(session.trajectories()) == 1


async def test_the_prompts_of_a_request_are_sampled_at_the_same_time(
    client: sglrl.Client, gateway: Any
) -> None:
    async with gateway.session() as session, httpx.AsyncClient(timeout=300) as http:
        body = {"prompt": [[5], [6], [7]], "max_tokens": 1000}
        turn = asyncio.ensure_future(http.post(f"{session.base_url}/completions", json=body))
        await until_running(client, 3)
        assert len((await turn).json()["choices"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "name", "abort", "key"),
    [
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"max_new_tokens": 100_000}},
            "id",
            "/abort_request",
            "rid",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"max_tokens": 100_000}},
            "request_id",
            "/inference/v1/abort_requests",
            "request_ids",
        ),
    ],
)
async def test_an_abort_by_the_id_that_the_gateway_made(
    gateway: Any, path: str, body: dict[str, Any], name: str, abort: str, key: str
) -> None:
    found = last = ""
    async with (
        asyncio.timeout(300),
        httpx.AsyncClient(base_url=gateway.url, timeout=300) as http,
        http.stream("POST", path, json={**body, "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if not found and line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                found = event.get("meta_info", event)[name]
                ids: Any = [found] if key == "request_ids" else found
                assert (await http.post(abort, json={key: ids})).json() == {"aborted": 1}
            last = line or last
    assert last == "data: [DONE]"
