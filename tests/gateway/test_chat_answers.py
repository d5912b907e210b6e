"""Answers of chat completions, and the openai client with the fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

import sglrl
from sglrl.gateway.answers import message_of
from sglrl.gateway.chat import CHAT, ChatRequest, parse
from sglrl.gateway.conversations import Digest
from sglrl.gateway.serve import Gateway, serve
from sglrl.inference.message import AssistantMessage, ToolCall

from .made import client_of, completion

ASK: Any = [{"role": "user", "content": "Hé🙂!"}]


def answer(**fields: Any) -> Any:
    return CHAT.parse(json.dumps({"messages": ASK, **fields}).encode()).answer("tiny", "")


def chunks(stream: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
def test_a_call_that_is_cut(finish: str) -> None:
    """The first call is whole, but the turn has more that is lost."""
    whole = ToolCall(id="call_0_0", name="add", arguments={}, raw="")
    cut = ToolCall(id="call_0_1", name="", arguments=None, raw="{", error="it has no end")
    for calls, expected in (((whole,), "tool_calls"), ((whole, cut), finish)):
        ended = completion([0, 1, 2], finish=finish)
        ended.__dict__["message"] = AssistantMessage(content="", tool_calls=calls)
        (choice,) = answer().whole([ended])["choices"]
        assert choice["finish_reason"] == ("tool_calls" if finish == "stop" else expected)
        *_, last = chunks(answer(stream=True).end([ended], [{}]))
        assert last["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("stop", ["bc", 2, None])
def test_the_stop_that_ended_a_choice(stop: str | int | None) -> None:
    stops = [stop] if isinstance(stop, str) else []
    ended = completion([0, 1, 2], finish="stop" if stop else "length", stop_match=stop, stop=stops)
    (whole,) = answer().whole([ended])["choices"]
    assert whole["matched_stop"] == stop
    *_, last = chunks(answer(stream=True).end([ended], [{}]))
    assert last["choices"][0]["matched_stop"] == stop


def test_reasoning_content_is_a_field_of_each_message() -> None:
    ended = completion([0, 1])
    (whole,) = answer().whole([ended])["choices"]
    assert whole["message"]["reasoning_content"] is None
    made = answer(stream=True)
    stream = made.begin() + made.text(0, "content", "a") + made.end([ended], [{"content": "a"}])
    deltas = [part["choices"][0]["delta"] for part in chunks(stream)]
    assert [delta.get("content") for delta in deltas] == ["", "a", "b", None]
    assert {delta["reasoning_content"] for delta in deltas} == {None}


def test_each_logprob_is_sent_once() -> None:
    """Those of tokens that add no text come with the next text, or at the end."""
    made = answer(stream=True, logprobs=True, top_logprobs=2)
    ended = completion([0, 1, 2, 3], top=2)
    stream = made.text(0, "content", "a", lambda: completion([0, 1], top=2))
    stream += made.text(0, "content", "b") + made.end([ended], [{"content": "ab"}])
    found = [part["choices"][0].get("logprobs") for part in chunks(stream)]
    assert [len(one["content"]) if one else None for one in found] == [2, None, 2, None]
    whole = answer(logprobs=True, top_logprobs=2).whole([ended])["choices"][0]["logprobs"]
    assert [token for one in found if one for token in one["content"]] == whole["content"]


def test_calls_of_custom_tools_have_a_text() -> None:
    """Such a call that a client sends back is the one that was sampled."""
    patch = {"type": "custom", "custom": {"name": "patch", "description": "Edit."}}
    made = [("patch", {"input": "a"}), ("patch", {"x": 1}), ("other", {"input": "a"})]
    calls = [
        ToolCall(id=f"call_{at}", name=name, arguments=arguments, raw="")
        for at, (name, arguments) in enumerate(made)
    ]
    done = completion([1, 2], finish="stop")
    done.__dict__["message"] = AssistantMessage(content="", tool_calls=tuple(calls))
    fields = {"messages": ASK, "tools": [patch]}
    request = parse(json.dumps(fields).encode(), ChatRequest)
    (turn,) = request.turns()
    assert turn.tools == [
        {
            "type": "function",
            "function": {
                "name": "patch",
                "description": "Edit.",
                "parameters": {
                    "type": "object",
                    "properties": {"input": {"type": "string"}},
                    "required": ["input"],
                },
            },
        }
    ]
    said = request.answer("m", "").whole([done])["choices"][0]["message"]
    assert [call["type"] for call in said["tool_calls"]] == ["custom", "function", "function"]
    assert said["tool_calls"][0]["custom"] == {"name": "patch", "input": "a"}
    fields["messages"] = [*ASK, said]
    (turn,) = parse(json.dumps(fields).encode(), ChatRequest).turns()
    assert turn.messages is not None
    beginnings = Digest(turn.messages, {}).beginnings
    assert beginnings[-1] == Digest(ASK, {}).with_answer(message_of(done))


# --- with the fake engine, which repeats the prompt -----------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with (
        sglrl.launch("tiny", engine="fake", step_seconds=0.002, tokens_per_step=1) as pool,
        serve(pool, name="tiny") as gateway,
    ):
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_of_a_stream(client: openai.AsyncOpenAI) -> None:
    values: Any = {"model": "tiny", "messages": ASK, "max_tokens": 60, "n": 2}
    values |= {"logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**values)
    found: list[list[Any]] = [[], []]
    events = 0
    async for part in await client.chat.completions.create(stream=True, **values):
        (choice,) = part.choices
        if choice.delta.content and choice.finish_reason is None:
            events += 1
            assert choice.logprobs is not None
        if choice.logprobs is not None:
            found[choice.index] += choice.logprobs.content or []
    assert events > 4
    for choice, tokens in zip(whole.choices, found, strict=True):
        assert choice.logprobs is not None
        assert tokens == choice.logprobs.content
        assert len(tokens) == 60


@pytest.mark.asyncio(loop_scope="module")
async def test_the_card_of_a_model(client: openai.AsyncOpenAI) -> None:
    card: Any = await client.models.retrieve("tiny")
    assert (card.id, card.root) == ("tiny", "tiny")
