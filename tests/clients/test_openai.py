"""OpenAI's own library."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORD: Any = {"regex": "[a-z]{4,12}"}
ASK: Any = {"role": "user", "content": "What is 2 + 3?"}


class Sum(BaseModel):
    first: Literal["one", "two"]
    second: Literal["three", "four"]


ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": Sum.model_json_schema()},
}


def client_of(run: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key)


async def test_async(runs: Any) -> None:
    messages = [ASK]
    async with runs() as run, client_of(run) as client:
        for _ in range(3):
            made = await client.chat.completions.create(
                model="any", messages=messages, extra_body=WORD
            )
            messages += [made.choices[0].message, ASK]
    assert len(run.calls) == 3
    run.check(leaves=1)


async def test_sync_and_streamed(runs: Any) -> None:
    def program(run: Any) -> None:
        messages = [ASK]
        with openai.OpenAI(base_url=run.base_url, api_key=run.api_key) as client:
            for _ in range(2):
                with client.chat.completions.stream(
                    model="any", messages=messages, extra_body=WORD
                ) as stream:
                    texts = [event.delta for event in stream if event.type == "content.delta"]
                    said = stream.get_final_completion().choices[0].message
                assert "".join(texts) == said.content
                messages += [said, ASK]
            made = client.chat.completions.create(
                model="any", messages=messages, max_tokens=8, seed=1, extra_body=WORD
            )
            assert made.usage.completion_tokens <= 8

    async with runs() as run:
        await asyncio.to_thread(program, run)
    assert len(run.calls) == 3
    run.check(leaves=1)


async def test_parse(runs: Any) -> None:
    messages = [ASK]
    async with runs() as run, client_of(run) as client:
        for _ in range(2):
            made = await client.chat.completions.parse(
                model="any", messages=messages, response_format=Sum
            )
            said = made.choices[0].message
            assert said.parsed is not None
            assert said.parsed.first in ("one", "two")
            messages += [said, ASK]
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_tools(runs: Any, biases: Any) -> None:
    messages = [ASK]
    async with runs() as run, client_of(run) as client:
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            made = await client.chat.completions.create(
                model="any", messages=messages, tools=[ADD], tool_choice=choice,
                logit_bias=biases, max_tokens=500,
            )  # fmt: skip
            said = made.choices[0].message
            assert made.choices[0].finish_reason == "tool_calls"
            messages.append(said)
            for call in said.tool_calls:
                assert Sum(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
    assert len(run.calls) == 2
    run.check(leaves=1)


# --- the Responses API ----------------------------------------------------------------------------


async def test_responses(runs: Any) -> None:
    """The whole conversation with each request, or the name of the last response."""
    async with runs() as run, client_of(run) as client:
        items = [ASK]
        for _ in range(2):
            made = await client.responses.create(model="any", input=items, extra_body=WORD)
            items += [*made.output, ASK]
        async with client.responses.stream(model="any", input=items, extra_body=WORD) as stream:
            texts = [event.delta async for event in stream if event.type.endswith("text.delta")]
            made = await stream.get_final_response()
        assert "".join(texts) == made.output_text
        await client.responses.create(
            model="any", input=[ASK], previous_response_id=made.id, extra_body=WORD
        )
    assert len(run.calls) == 4
    run.check(leaves=1)


async def test_responses_parse(runs: Any) -> None:
    async with runs() as run, client_of(run) as client:
        made = await client.responses.parse(model="any", input=[ASK], text_format=Sum)
        assert made.output_parsed.first in ("one", "two")
        made = await client.responses.parse(
            model="any", input="And?", text_format=Sum, previous_response_id=made.id
        )
        assert made.output_parsed.second in ("three", "four")
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_responses_tools(runs: Any, biases: Any) -> None:
    tool = {"type": "function", **ADD["function"]}
    items = [ASK]
    async with runs() as run, client_of(run) as client:
        for choice in ("required", {"type": "function", "name": "add"}):
            made = await client.responses.create(
                model="any", input=items, tools=[tool], tool_choice=choice,
                max_output_tokens=500, extra_body={"logit_bias": biases},
            )  # fmt: skip
            items += made.output
            calls = [item for item in made.output if item.type == "function_call"]
            assert calls
            for call in calls:
                assert Sum(**json.loads(call.arguments))
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
                )
    assert len(run.calls) == 2
    run.check(leaves=1)
