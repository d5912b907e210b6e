"""OpenAI's client and the Responses API of the gateway, over real sockets, with the fake engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio

import sglrl
from sglrl.gateway.responses import ResponsesRequest
from sglrl.gateway.serve import Gateway, serve

from .made import client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

VALUES: dict[str, Any] = {"model": "tiny", "max_output_tokens": 20}
TOKENS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", step_seconds=0.002, tokens_per_step=1) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name="tiny") as gateway:
        yield gateway


async def test_texts_items_and_streams(gateway: Gateway) -> None:
    async with client_of(gateway) as client:
        one = await client.responses.create(input="Hi", **VALUES)
        parts: Any = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}]
        same = await client.responses.create(
            input=[{"role": "user", "content": parts}], **VALUES, include=LOGPROBS, top_logprobs=0
        )
        assert (one.output_text, one.object, one.error) == (same.output_text, "response", None)
        assert one.output_text
        assert one.usage is not None
        assert one.usage.output_tokens == 20
        assert one.usage.total_tokens == one.usage.input_tokens + 20
        assert one.status == "incomplete"
        assert one.incomplete_details is not None
        assert one.incomplete_details.reason == "max_output_tokens"
        (item,) = same.output
        assert item.type == "message"
        (part,) = item.content
        assert part.type == "output_text"
        assert part.logprobs is not None
        assert [entry.logprob for entry in part.logprobs] == [-(i + 1) / 1024 for i in range(20)]
        async with client.responses.stream(input="Hi", **VALUES) as stream:
            events = [event async for event in stream]
        kinds = [event.type for event in events]
        assert kinds.count("response.output_text.delta") > 3
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        last: Any = events[-1]
        assert last.type == "response.incomplete"
        assert text == last.response.output_text
        assert one.output_text == last.response.output_text
    assert await asyncio.to_thread(_without_asyncio, gateway.url) == (text, text)


def _without_asyncio(url: str) -> tuple[str, str]:
    with openai.OpenAI(base_url=url + "/v1", api_key="x") as client:
        whole = client.responses.create(input="Hi", **VALUES).output_text
        with client.responses.stream(input="Hi", **VALUES) as stream:
            deltas = [one.delta for one in stream if one.type == "response.output_text.delta"]
    return whole, "".join(deltas)


async def test_a_response_is_continued_by_its_id(gateway: Gateway) -> None:
    """Its conversation goes on with exactly its tokens, but without its instructions."""
    async with gateway.session() as session, client_of(session) as client:

        async def ask(text: str, **more: Any) -> Any:
            return await client.responses.create(input=text, **VALUES, **TOKENS, **more)

        first = await ask("Hi", instructions="Be brief.")
        stream = await ask(
            "And?", instructions="Be brief.", previous_response_id=first.id, stream=True
        )
        *_, last = [event async for event in stream]
        second = last.response
        assert second.previous_response_id == first.id
        third = await ask("So?", instructions="Be brief.", previous_response_id=second.id)
        before: list[int] = []
        for made in (first, second, third):
            assert made.prompt_token_ids[: len(before)] == before
            before = made.prompt_token_ids + made.token_ids
        # The same with all items, and with other instructions.
        items: Any = [
            {"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"},
        ]  # fmt: skip
        same = await client.responses.create(
            input=items, instructions="Be brief.", **VALUES, **TOKENS
        )
        assert same.prompt_token_ids == second.prompt_token_ids
        other = await ask("And?", previous_response_id=first.id)
        assert len(other.prompt_token_ids) < len(second.prompt_token_ids)
    assert session.trajectory is not None
    # The first turn has two continuations. Its tokens are in the loss of one of them.
    longest, *_ = leaves = session.trajectory.leaves
    assert [len(leaf.turns) for leaf in leaves] == [2, 2, 1]
    assert np.concatenate([longest.prompt_ids, longest.response_ids]).tolist() == before
    assert session.trajectory.messages is not None
    assert [message["role"] for message in session.trajectory.messages] == [
        "user", "assistant", "user", "assistant",
    ]  # fmt: skip


async def test_a_repeated_request_is_stored_under_both_ids(gateway: Gateway) -> None:
    again = {"x-stainless-retry-count": "1"}
    async with gateway.session() as session, client_of(session) as client:
        one = await client.responses.create(input="Hi", **VALUES)
        same = await client.responses.create(input="Hi", **VALUES, extra_headers=again)
        assert (one.id == same.id, one.output_text == same.output_text) == (False, True)
        for made in (one, same):
            await client.responses.create(input="And?", **VALUES, previous_response_id=made.id)
    assert session.trajectory is not None
    assert [len(leaf.turns) for leaf in session.trajectory.leaves] == [1, 2]


async def test_responses_that_are_not_stored(gateway: Gateway) -> None:
    async with (
        gateway.session() as session,
        gateway.session() as other,
        client_of(session) as client,
        client_of(other) as stranger,
        client_of(gateway) as alone,
    ):
        stored = await client.responses.create(input="Hi", **VALUES)
        unstored = await client.responses.create(input="Hi", **VALUES, store=False)
        sessionless = await alone.responses.create(input="Hi", **VALUES)
        for asked, id_, message in (
            (client, "resp_none", "this session has no response 'resp_none'"),
            (client, unstored.id, "this session has no response"),
            (stranger, stored.id, "this session has no response"),
            (alone, sessionless.id, "previous_response_id needs a session"),
        ):
            for stream in (False, True):
                values: Any = {**VALUES, "stream": stream}
                with pytest.raises(openai.BadRequestError, match=message) as error:
                    await asked.responses.create(input="x", **values, previous_response_id=id_)
                assert error.value.code == "previous_response_not_found"
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError, match="there is no endpoint"):
                await call(stored.id)
        await stranger.responses.create(input="Hi", **VALUES)


async def test_errors(gateway: Gateway) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": "gpt"}, openai.NotFoundError, "there is no model 'gpt'; there is: tiny"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens must be at least 1"),
        ({"input": []}, openai.BadRequestError, "'input' is missing or empty"),
        ({"background": True}, openai.BadRequestError, "'background' is not supported"),
        ({"temperature": -1}, openai.BadRequestError, "temperature must be in"),
        ({"input": "x " * 40_000}, openai.BadRequestError, "context"),
    ]
    async with client_of(gateway) as client:
        for change, kind, message in wrong:
            values: Any = {"input": "Hi", **VALUES, **change}
            for stream in (False, True):
                with pytest.raises(kind, match=message) as error:
                    await client.responses.create(**values, stream=stream)
        assert error.value.code == "context_length_exceeded"  # type: ignore[attr-defined]
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        broken = await http.post("/v1/responses", content=b"{")
        assert broken.status_code == 400
        assert "not a JSON object" in broken.json()["error"]["message"]


@pytest.mark.parametrize("seed", range(2))
async def test_hostile_requests(gateway: Gateway, seed: int) -> None:
    """Each gets an answer that says what is wrong, and none is an internal error."""
    chance = random.Random(seed)
    odd: list[Any] = [
        None, True, False, 0, -1, 3, 10**30, 1.5, "", "x", "\ud800", "\x00", [], {}, [[]], [{}],
        ["x"], [{"role": "user", "content": "\x00"}], [{"role": "user", "content": [{}]}],
        {"a": {"b": []}},
        [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": 3}]}], "required",
        [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}], "a" * 5000,
        [{"type": "function", "name": "f", "parameters": 5}], {"type": "function", "name": "f"},
        {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}, LOGPROBS, "resp_1",
    ]  # fmt: skip
    seen = set()
    async with gateway.session() as session, httpx.AsyncClient(timeout=300) as http:
        http.headers["authorization"] = f"Bearer {session.api_key}"
        for _ in range(300):
            fields = {**VALUES, "input": "Hi", "max_output_tokens": 2}
            for name in chance.sample(ResponsesRequest.__struct_fields__, chance.randint(1, 3)):
                fields[name] = chance.choice(odd)
            body = json.dumps(fields)
            answer = await http.post(f"{gateway.url}/v1/responses", content=body)
            seen.add(answer.status_code)
            assert answer.status_code in (200, 400), (body, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["message"]
                assert answer.json()["error"]["type"] == "invalid_request_error"
    assert seen == {200, 400}


async def test_a_stream_whose_session_ends(gateway: Gateway) -> None:
    slow: Any = {**VALUES, "max_output_tokens": 2000}
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        session = (await http.post("/sessions")).json()
        async with openai.AsyncOpenAI(
            base_url=session["base_url"], api_key=session["api_key"], max_retries=0
        ) as client:
            last: Any = None
            async for last in await client.responses.create(input="Hi", **slow, stream=True):
                if last.type == "response.content_part.added":
                    assert (await http.delete(f"/sessions/{session['id']}")).status_code == 200
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.code == "server_error"
    assert "has ended" in last.response.error.message
