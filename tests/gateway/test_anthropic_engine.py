"""Anthropic's client against the gateway and the real engine, with transformers as the judge."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import pytest
import pytest_asyncio
from engine.reference import Reference
from sessions.families import FAMILIES, family_tokenizer
from sessions.test_tool_loops import Grammar

import sglrl
from sglrl.gateway.serve import Gateway, serve
from sglrl.launching.tiny_model import make_model

from .test_chat_engine import CALL, TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="session")

THINKS_AND_CALLS = rf"<think>\n[a-z]{{9}}\n</think>\n\n[a-z]{{4}}\n{CALL}\n{CALL}"
STOPS = "[a-z]{5}END[a-z]{9}"
OURS: Any = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def policy(models: Path) -> Reference:
    folder = make_model(models / "qwen3-anthropic")
    family_tokenizer(folder, FAMILIES["qwen3"])
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(policy: Reference) -> AsyncIterator[Gateway]:
    # A random model fills a JSON text with white space wherever the grammar allows it.
    options: dict[str, Any] = {"constrained_json_disable_any_whitespace": True}
    async with (
        sglrl.launch(policy.folder, device="cpu", **options) as client,
        serve(client, name="policy") as gateway,
    ):
        yield gateway


@pytest.fixture(scope="module")
def bias(policy: Reference) -> dict[int, float]:
    """Makes the tags single tokens."""
    tags = ("</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    return {policy.tokenizer.convert_tokens_to_ids(tag): 100.0 for tag in tags}


def check(
    trajectory: sglrl.Trajectory, policy: Reference, bias: dict[int, float], patterns: list[str]
) -> None:
    """Compare every logprob with transformers'.

    Args:
        patterns: of each turn.
    """
    prompt = len(trajectory.prompt_ids)
    logits = policy.logits(trajectory.input_ids)[:-1]
    assert len(trajectory.turns) == len(patterns)
    assert sum(turn.stop - turn.start for turn in trajectory.turns) == trajectory.loss_mask.sum()
    for turn, pattern in zip(trajectory.turns, patterns, strict=True):
        at = slice(prompt + turn.start - 1, prompt + turn.stop - 1)
        sampled = trajectory.response_ids[turn.start : turn.stop].tolist()
        expected = Grammar(policy.tokenizer, 512, bias, pattern).logprobs(logits[at], sampled)
        found = trajectory.logprobs[turn.start : turn.stop]
        np.testing.assert_allclose(found, expected, atol=2e-4)


async def test_every_token_of_a_session_with_tools(
    gateway: Gateway, policy: Reference, bias: dict[int, float]
) -> None:
    """Whole and streamed turns, with all that a client sends back: thinking, text and calls."""
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    extra: dict[str, Any] = {"logit_bias": bias, "regex": THINKS_AND_CALLS}
    values: Any = {"model": "any", "tools": OURS, "max_tokens": 300, "extra_body": extra}
    cached = []
    async with (
        gateway.session() as session,
        anthropic.AsyncAnthropic(base_url=session.base_url, api_key=session.api_key) as agent,
    ):
        for number in range(4):
            if number % 2:
                async with agent.messages.stream(messages=messages, **values) as stream:
                    answer: Any = await stream.get_final_message()
            else:
                answer = await agent.messages.create(messages=messages, **values)
            kinds = [block.type for block in answer.content]
            assert kinds == ["thinking", "text", "tool_use", "tool_use"]
            assert answer.stop_reason == "tool_use"
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert all(call.input.keys() == {"a", "b"} for call in calls)
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"])}
                for call in calls
            ]
            messages += [{"role": "assistant", "content": answer.content}]
            messages += [{"role": "user", "content": results}]
            cached.append(answer.usage.cache_read_input_tokens)
        await session.reward(1.0, "call", call=calls[1].id)
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    check(trajectory, policy, bias, [THINKS_AND_CALLS] * 4)
    assert trajectory.turns[-1].rewards[0].value == 1.0
    last = len(trajectory.prompt_ids) + trajectory.turns[-1].start
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == last
    assert cached[0] < cached[1] < cached[2] < cached[3]
    assert trajectory.messages is not None
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", *["assistant", "tool", "tool"] * 3, "assistant"]


async def test_the_end_of_a_turn(gateway: Gateway, policy: Reference) -> None:
    """A stop sequence, a grammar of JSON, and tools that must be called."""
    end = {policy.tokenizer.convert_tokens_to_ids(tag): 100.0 for tag in ("</think>", "<|im_end|>")}
    ask: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
    ask |= {"max_tokens": 300}
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x") as agent:
        for stream in (True, False):
            stops: Any = {**ask, "stop_sequences": ["END"], "extra_body": {"regex": STOPS}}
            if stream:
                async with agent.messages.stream(**stops) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await agent.messages.create(**stops)
            assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
            (block,) = answer.content
            assert len(block.text) == 5
        forced: Any = {**ask, "tools": OURS, "extra_body": {"logit_bias": end}}
        for choice, names in (
            ({"type": "tool", "name": "multiply"}, {"multiply"}),
            ({"type": "any"}, {"add", "multiply"}),
        ):
            answer = await agent.messages.create(tool_choice=choice, **forced)
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert {call.name for call in calls} <= names
            assert calls
            assert answer.stop_reason == "tool_use"
        schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
        schema |= {"additionalProperties": False}
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        answer = await agent.messages.create(output_config=form, **ask)
        assert answer.stop_reason == "end_turn"
        assert json.loads(answer.content[-1].text) == {"a": 7}
