"""Anthropic's client against the gateway, over real sockets, with the fake engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import pytest_asyncio
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.gateway.anthropic import MessagesRequest
from sglrl.gateway.serve import Gateway, serve

from .test_anthropic import ADD, ASK, CACHED, CALL, IMAGE, blocks_of
from .test_anthropic_answers import check_events

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[sglrl.Client]:
    """The engine repeats the prompt. A turn of this model begins with reasoning."""
    folder: Path = tmp_path_factory.mktemp("qwen3.5")
    family_tokenizer(folder, FAMILIES["qwen3.5"])
    options: dict[str, Any] = {"step_seconds": 0.002, "tokens_per_step": 4}
    async with sglrl.launch(str(folder), engine="fake", **options) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name="tiny", api_key="secret", max_body_bytes=100_000) as gateway:
        yield gateway


def agent_of(base_url: str, api_key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key, max_retries=0)


SAYS = """Hm.
</think>

I add.
<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>"""
"""What the model says, after the token and the role that begin the prompt."""


def result_of(answer: Any, form: int) -> dict[str, Any]:
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    block = {"type": "tool_result", "tool_use_id": call.id}
    if form == 0:
        return {"role": "user", "content": [{**block, "content": "3"}]}
    if form == 1:
        content = [{"type": "text", "text": "no number"}]
        return {"role": "user", "content": [{**block, "content": content, "is_error": True}]}
    return {"role": "user", "content": [{**block, **CACHED}]}


async def test_turns_with_tools_are_one_conversation(gateway: Gateway, pool: sglrl.Client) -> None:
    """The client sends thinking, calls and results back, in any form that the API allows."""
    tokens = len(pool.tokenizer.encode(f"<|im_start|>user\n{SAYS}"))
    async with gateway.session() as session:
        # Its URL ends with /v1, and the client appends /v1/messages.
        roots = (session.base_url, session.base_url.removesuffix("/v1"))
        messages: list[Any] = [{"role": "user", "content": SAYS}]
        for number in range(4):
            async with agent_of(roots[number % 2], session.api_key) as agent:
                values: Any = {"model": "any", "messages": messages, "max_tokens": tokens}
                if number < 2:
                    answer: Any = await agent.messages.create(**values)
                else:
                    async with agent.messages.stream(**values) as stream:
                        answer = await stream.get_final_message()
            kinds = [block.type for block in answer.content]
            assert kinds == ["thinking", "text", "tool_use"], answer
            thinking, text, call = answer.content
            assert thinking.thinking.endswith("Hm.")
            assert text.text.strip() == "I add."
            assert (call.id, call.name, call.input) == (f"call_{number}_0", "add", {"a": 1})
            assert answer.stop_reason == "tool_use"
            assert answer.usage.output_tokens == tokens
            messages += [{"role": "assistant", "content": answer.content}]
            messages += [result_of(answer, number % 3)]
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    assert len(trajectory.turns) == 4
    assert trajectory.messages is not None
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", *["assistant", "tool"] * 3, "assistant"]
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert results == ["3", "error: no number", ""]


async def test_without_a_session(gateway: Gateway) -> None:
    values: Any = {"model": "tiny", "max_tokens": 6, "messages": [ASK], "system": "Be brief."}
    values |= {"extra_body": {"return_token_ids": True}}
    async with agent_of(gateway.url, "secret") as agent:
        count = await agent.messages.count_tokens(
            model="tiny", messages=[ASK], system="Be brief.", tools=[ADD]
        )
        whole: Any = await agent.messages.create(**values)
        async with agent.messages.stream(**values) as stream:
            check_events([event async for event in stream._raw_stream])
        async with agent.messages.stream(**values) as stream:
            final = await stream.get_final_message()
    assert whole.id.startswith("msg_")
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")
    assert whole.stop_reason == "max_tokens"
    assert (whole.token_ids, whole.weight_versions) == (
        whole.prompt_token_ids[:6],
        [{"version": 0, "start": 0, "end": 6}],
    )
    assert whole.usage.input_tokens == len(whole.prompt_token_ids) < count.input_tokens
    assert (final.content, final.usage) == (whole.content, whole.usage)


async def test_a_client_without_an_event_loop(gateway: Gateway) -> None:
    def use() -> None:
        with anthropic.Anthropic(base_url=gateway.url, api_key="secret", max_retries=0) as agent:
            values: Any = {"model": "tiny", "max_tokens": 6, "messages": [ASK]}
            whole = agent.messages.create(**values)
            with agent.messages.stream(**values) as stream:
                list(stream.text_stream)
                assert stream.get_final_message().content == whole.content
            assert agent.messages.count_tokens(model="tiny", messages=[ASK]).input_tokens > 6

    await asyncio.to_thread(use)


PLAIN: dict[str, Any] = {
    "chat_template_kwargs": {"chat_template": "{{ messages[0]['content'] }}"},
    "return_token_ids": True,
}
"""A template without a format for calls: all text of an answer arrives at once."""


async def test_text_arrives_before_the_end(gateway: Gateway) -> None:
    asks = {"role": "user", "content": " one two three" * 9}
    values: Any = {"model": "tiny", "max_tokens": 60, "messages": [asks], "extra_body": PLAIN}
    async with agent_of(gateway.url, "secret") as agent:
        whole = await agent.messages.create(**values)
        raw = await agent.messages.create(stream=True, **values)
        events = [event async for event in raw]
    check_events(events)
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert len(texts) > 3
    (block,) = whole.content
    assert "".join(texts) == block.text
    assert block.text.startswith(" one two")
    assert events[-2].delta.prompt_token_ids == whole.prompt_token_ids
    assert events[-2].delta.weight_versions == whole.weight_versions


async def test_an_error_in_a_stream(gateway: Gateway) -> None:
    async with (
        httpx.AsyncClient(base_url=gateway.url, headers={"x-api-key": "secret"}) as http,
        agent_of(gateway.url, "secret") as agent,
    ):
        made = (await http.post("/sessions")).json()
        values: Any = {"model": "any", "max_tokens": 20_000, "messages": [ASK]}
        own = {"authorization": f"Bearer {made['api_key']}"}
        stream = await agent.messages.create(
            stream=True, extra_body=PLAIN, extra_headers=own, **values
        )
        with pytest.raises(anthropic.APIStatusError, match="has ended") as error:
            async for event in stream:
                if event.type == "content_block_start":
                    assert (await http.delete(f"/sessions/{made['id']}")).status_code == 200
    assert error.value.body == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "the session has ended, or the gateway is ending",
        },
    }


async def test_a_repeated_request_is_the_same_turn(gateway: Gateway) -> None:
    async with (
        gateway.session() as session,
        agent_of(session.base_url, session.api_key) as agent,
    ):
        values: Any = {"model": "any", "max_tokens": 6, "messages": [ASK]}
        again = {"x-stainless-retry-count": "1"}
        await agent.messages.create(**values)
        await agent.messages.create(extra_headers=again, **values)
        # The second attempt of a stream gets it whole.
        async with agent.messages.stream(**values) as stream:
            first = await stream.get_final_message()
        async with agent.messages.stream(extra_headers=again, **values) as stream:
            second = await stream.get_final_message()
        assert second.content == first.content
    assert session.trajectory is not None
    assert sum(len(leaf.turns) for leaf in session.trajectory.leaves) == 2


async def test_errors(gateway: Gateway) -> None:
    long = {"role": "user", "content": "a " * 45_000}
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": "gpt"}, anthropic.NotFoundError, "there is no model 'gpt'; there is: tiny"),
        (blocks_of("user", IMAGE), anthropic.BadRequestError, "is of type 'image'"),
        ({"system": "x" * 100_000}, anthropic.RequestTooLargeError, "more than 100,000 bytes"),
        ({"messages": [long]}, anthropic.BadRequestError, "prompt is too long: the context is"),
        ({"temperature": -1}, anthropic.BadRequestError, "temperature must be in"),
    ]
    async with agent_of(gateway.url, "secret") as agent:
        for change, kind, message in wrong:
            values: Any = {"model": "tiny", "messages": [ASK], "extra_body": change}
            for more in ({}, {"stream": True}):
                with pytest.raises(kind, match=message) as error:
                    await agent.messages.create(max_tokens=4, **values, **more)
                assert error.value.body["type"] == "error"  # type: ignore[attr-defined]
            if kind != anthropic.BadRequestError or "image" in message:
                with pytest.raises(kind, match=message):
                    await agent.messages.count_tokens(**values)
    async with agent_of(gateway.url, "wrong") as agent:
        with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"):
            await agent.messages.create(model="tiny", messages=[ASK], max_tokens=4)
        with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"):
            await agent.messages.count_tokens(model="tiny", messages=[ASK])
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        body = {"model": "tiny", "messages": [ASK], "max_tokens": 4}
        for path in ("/v1/messages", "/v1/v1/messages", "/v1/messages/count_tokens"):
            for key, status in (("secret", 200), ("wrong", 401)):
                # Earlier versions of the client send the key in this header.
                answer = await http.post(path, json=body, headers={"x-api-key": key})
                assert answer.status_code == status, answer.text
        assert answer.json()["error"]["type"] == "authentication_error"


def hostile(chance: random.Random) -> bytes:
    """Return the body of a request that is probably wrong."""
    odd: list[Any] = [
        None, True, False, 0, -1, 3, 10**30, 1.5, "", "x", "\ud800", "\x00", [], {}, [[]], [{}],
        {"type": "any"}, {"type": "tool", "name": "x"}, {"type": "adaptive"}, {"a": {"b": []}},
        {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "a" * 5000, [ADD, ADD],
        [{**ADD, "input_schema": {"type": 5}}], [{"type": "text", "text": "\ud800"}], ["\ud800"],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": []}]}],
        [{"role": "assistant", "content": [CALL]}, ASK], [ASK, {"role": "system", "content": ""}],
        [{"role": "assistant", "content": [{**CALL, "input": {"\ud800": 1}}]}, ASK],
    ]  # fmt: skip
    fields: dict[str, Any] = {"messages": [ASK], "model": "tiny", "max_tokens": 2}
    for name in chance.sample(MessagesRequest.__struct_fields__, chance.randint(1, 3)):
        fields[name] = chance.choice(odd)
    body = json.dumps(fields).encode()
    if chance.random() < 0.2:
        at = chance.randrange(len(body))
        body = body[:at] + chance.randbytes(chance.randint(0, 3)) + body[at + 2 :]
    return body


async def test_hostile_requests(gateway: Gateway) -> None:
    """Each gets an answer that says what is wrong, and none is an internal error."""
    chance = random.Random(5)
    bodies = [hostile(chance) for _ in range(400)]
    seen = set()
    async with httpx.AsyncClient(base_url=gateway.url, timeout=300) as http:
        http.headers["x-api-key"] = "secret"

        async def send(body: bytes, path: str) -> None:
            answer = await http.post(path, content=body)
            seen.add(answer.status_code)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code == 200 and answer.headers["content-type"].startswith("text/"):
                assert "event: message_stop" in answer.text
            elif answer.status_code != 200:
                made = answer.json()
                assert made["type"] == "error"
                assert made["error"]["type"] in ("invalid_request_error", "not_found_error")
                assert made["error"]["message"]

        for begin in range(0, len(bodies), 20):
            paths = ["/v1/messages/count_tokens", *["/v1/messages"] * 3] * 5
            await asyncio.gather(*map(send, bodies[begin : begin + 20], paths))
    assert seen == {200, 400, 404}
