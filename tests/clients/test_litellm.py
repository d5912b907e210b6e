"""LiteLLM, as a program that uses its functions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: Any = {"role": "user", "content": "What is 2 + 3?"}
LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": ["apple", "pear"]}},
            "required": ["word"],
        },
    },
}


def settings(run: Any) -> dict[str, Any]:
    return {
        "model": "openai/any",
        "api_base": run.base_url,
        "api_key": run.api_key,
        "extra_body": {"regex": "[a-z]{4,12}"},
    }


async def test_completion(runs: Any) -> None:
    def program(run: Any) -> None:
        messages = [ASK]
        for _ in range(2):
            made = litellm.completion(messages=messages, **settings(run))
            messages += [made.choices[0].message, ASK]
        stream = litellm.completion(messages=messages, stream=True, **settings(run))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        messages += [{"role": "assistant", "content": text}, ASK]
        litellm.completion(messages=messages, **settings(run))

    async with runs() as run:
        await asyncio.to_thread(program, run)
    assert len(run.calls) == 4
    run.check(leaves=1)


async def test_acompletion(runs: Any) -> None:
    messages = [ASK]
    async with runs() as run:
        for _ in range(2):
            made = await litellm.acompletion(messages=messages, **settings(run))
            messages += [made.choices[0].message, ASK]
        stream = await litellm.acompletion(
            messages=messages, stream=True, stream_options={"include_usage": True}, **settings(run)
        )
        chunks = [chunk async for chunk in stream]
        assert litellm.stream_chunk_builder(chunks).usage.completion_tokens >= 4
    assert len(run.calls) == 3
    run.check(leaves=1)


async def test_messages_of_anthropic(runs: Any) -> None:
    """With this provider it sends the API's own form, and other fields as they are."""
    messages = [ASK]
    async with runs() as run:
        options = settings(run) | {"model": "anthropic/any", "regex": "[a-z]{4,12}"}
        del options["extra_body"]
        for _ in range(2):
            made = await litellm.acompletion(messages=messages, max_tokens=20, **options)
            messages += [made.choices[0].message, ASK]
    assert {call.path for call in run.calls} == {"/v1/messages"}
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_tools(runs: Any, biases: Any) -> None:
    messages = [ASK]
    async with runs() as run:
        options = settings(run)
        options |= {"tools": [LOOK], "tool_choice": "required", "extra_body": {}}
        for _ in range(2):
            made = await litellm.acompletion(
                messages=messages, logit_bias=biases, max_tokens=500, **options
            )
            said = made.choices[0].message
            messages.append(said)
            for call in said.tool_calls:
                assert json.loads(call.function.arguments)["word"] in ("apple", "pear")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a fruit"})
    assert len(run.calls) == 2
    run.check(leaves=1)
