"""OpenAI's client, the gateway's Responses API and the real engine."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import numpy as np
import openai
import pytest
import torch
from engine.reference import Reference
from openai.types.responses import ParsedResponse
from pydantic import BaseModel

import sglrl
from sglrl.gateway.serve import Gateway, serve

from . import test_chat_engine
from .test_chat_engine import CALL, agent_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

policy, pool, gateway = test_chat_engine.policy, test_chat_engine.pool, test_chat_engine.gateway
banned, words = test_chat_engine.banned, test_chat_engine.words

TOOLS: Any = [
    {"type": "function", "strict": True, **made["function"]} for made in test_chat_engine.TOOLS
]


@pytest.mark.parametrize("by_id", [False, True], ids=["all items", "previous_response_id"])
async def test_calls_of_tools(
    gateway: Gateway,
    policy: Reference,
    pool: sglrl.Client,
    words: Any,
    banned: list[int],
    by_id: bool,
) -> None:
    """Turns with calls, whole and streamed, and a last one without: a single trajectory."""
    tags = ("</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    bias = {str(pool.tokenizer.convert_tokens_to_ids(tag)): 100 for tag in tags}
    pattern = rf"<think>\n[a-z]{{40}}\n</think>\n\n[a-z]{{40}}\n{CALL}\n{CALL}"
    calls: Any = {"extra_body": {"regex": pattern, "logit_bias": bias, "return_token_ids": True}}
    free: Any = {"extra_body": words, "max_output_tokens": 9}
    items: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    responses: list[Any] = []
    async with gateway.session() as session, agent_of(session) as agent:
        for number in range(4):
            values: Any = {
                "model": "any", "instructions": "Use tools.", "tools": TOOLS, "input": items,
                **(calls if number < 3 else free),
            }  # fmt: skip
            if by_id and responses:
                values["previous_response_id"] = responses[-1].id
            if number == 1:
                async with agent.responses.stream(**values) as stream:
                    kinds = [event.type async for event in stream]
                    made = await stream.get_final_response()
                assert kinds.count("response.reasoning_text.delta") > 1
                assert kinds.count("response.output_text.delta") > 1
                assert kinds.count("response.function_call_arguments.done") == 2
            else:
                made = await agent.responses.create(**values)
            responses.append(made)
            output = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
                for item in made.output
                if item.type == "function_call"
            ]
            items = output if by_id else [*items, *made.output, *output]
    *called, last = responses
    for made in called:
        kinds = [item.type for item in made.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert made.status == "completed"
        assert made.usage is not None
        reasoning = made.usage.output_tokens_details.reasoning_tokens
        text = pool.tokenizer.decode(made.token_ids[:reasoning])
        assert text == f"<think>\n{made.output[0].content[0].text.strip()}"
    assert last.status == "incomplete"
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    assert len(trajectory.turns) == 4
    assert trajectory.messages is not None
    assert [message["role"] for message in trajectory.messages] == [
        "system", "user", *["assistant", "tool", "tool"] * 3, "assistant",
    ]  # fmt: skip
    ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    logits = policy.logits(ids)[len(trajectory.prompt_ids) - 1 : -1].clone()
    for turn in trajectory.turns:
        own, rows = slice(turn.start, turn.stop), logits[turn.start : turn.stop]
        found = trajectory.logprobs[own]
        if turn is trajectory.turns[-1]:
            rows[:, banned] -= 100
            expected = _logprobs(rows, trajectory.response_ids[own])
            np.testing.assert_allclose(found, expected, atol=2e-4)
            continue
        rows[:, [int(token) for token in bias]] += 100
        # A grammar removes other tokens, so those that it allows are at least as likely.
        assert (found >= _logprobs(rows, trajectory.response_ids[own]) - 2e-4).all()


def _logprobs(logits: torch.Tensor, ids: Any) -> Any:
    return torch.log_softmax(logits, -1).numpy()[np.arange(len(ids)), ids]


async def test_one_tool_is_chosen(gateway: Gateway, pool: sglrl.Client) -> None:
    closing = str(pool.tokenizer.convert_tokens_to_ids("</think>"))
    async with gateway.session() as session, agent_of(session) as agent:
        made = await agent.responses.create(
            model="any", input="What is 2 + 3?", tools=TOOLS, parallel_tool_calls=False,
            tool_choice={"type": "function", "name": "multiply"},
            extra_body={"logit_bias": {closing: 100}},
        )  # fmt: skip
        (call,) = [item for item in made.output if item.type == "function_call"]
        assert call.name == "multiply"
        assert made.tool_choice.model_dump() == {"type": "function", "name": "multiply"}


class Colour(BaseModel):
    colour: Literal["red", "blue"]
    sure: bool


async def test_a_schema(client: sglrl.Client) -> None:
    values: Any = {"model": "policy", "input": "Which colour?", "text_format": Colour}
    async with serve(client, name="policy") as gateway:
        url = gateway.url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x") as agent:
            made = await agent.responses.parse(**values)
            assert isinstance(made.output_parsed, Colour)
            assert made.status == "completed"
            async with agent.responses.stream(**values) as stream:
                texts = [
                    event.delta
                    async for event in stream
                    if event.type == "response.output_text.delta"
                ]
                final: ParsedResponse[Colour] = await stream.get_final_response()
            assert isinstance(final.output_parsed, Colour)
            assert "".join(texts) == final.output_text
        assert isinstance(await asyncio.to_thread(_parse, url, values), Colour)


def _parse(url: str, values: Any) -> Any:
    with openai.OpenAI(base_url=url, api_key="x") as agent:
        return agent.responses.parse(**values).output_parsed
