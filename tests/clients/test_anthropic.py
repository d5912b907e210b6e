"""Anthropic's own library."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK: Any = {"role": "user", "content": "What is 2 + 3?"}
WORD: Any = {"max_tokens": 100, "extra_body": {"regex": "[a-z]{4,12}"}}


class Fruit(BaseModel):
    name: Literal["apple", "pear"]


LOOK: Any = {
    "name": "look_up",
    "description": "Look up a fruit.",
    "input_schema": Fruit.model_json_schema(),
}


def client_of(run: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=run.base_url, api_key=run.api_key)


async def test_async_and_streamed(runs: Any) -> None:
    messages = [ASK]
    async with runs() as run, client_of(run) as client:
        for _ in range(2):
            made = await client.messages.create(
                model="any", system="Be brief.", messages=messages, **WORD
            )
            messages += [{"role": "assistant", "content": made.content}, ASK]
        async with client.messages.stream(
            model="any", system="Be brief.", messages=messages, **WORD
        ) as stream:
            text = "".join([text async for text in stream.text_stream])
            made = await stream.get_final_message()
        assert made.content[0].text == text
        messages += [{"role": "assistant", "content": made.content}, ASK]
        await client.messages.create(model="any", system="Be brief.", messages=messages, **WORD)
    assert len(run.calls) == 4
    run.check(leaves=1)


async def test_sync(runs: Any) -> None:
    def program(run: Any) -> None:
        messages = [ASK]
        with anthropic.Anthropic(base_url=run.base_url, api_key=run.api_key) as client:
            for _ in range(2):
                made = client.messages.create(model="any", messages=messages, **WORD)
                messages += [{"role": "assistant", "content": made.content[0].text}, ASK]

    async with runs() as run:
        await asyncio.to_thread(program, run)
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_tools(runs: Any, biases: Any) -> None:
    messages = [ASK]
    async with runs() as run, client_of(run) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "look_up"}):
            made = await client.messages.create(
                model="any", messages=messages, tools=[LOOK], tool_choice=choice,
                max_tokens=500, extra_body={"logit_bias": biases},
            )  # fmt: skip
            assert made.stop_reason == "tool_use"
            messages.append({"role": "assistant", "content": made.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "a fruit"}
                for block in made.content
                if block.type == "tool_use" and Fruit(**block.input)
            ]
            messages.append({"role": "user", "content": results})
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_parse(runs: Any) -> None:
    async with runs() as run, client_of(run) as client:
        made = await client.messages.parse(
            model="any", messages=[ASK], max_tokens=100, output_format=Fruit
        )
        assert isinstance(made.parsed_output, Fruit)
        messages = [ASK, {"role": "assistant", "content": made.content}, ASK]
        made = await client.messages.parse(
            model="any", messages=messages, max_tokens=100, output_format=Fruit
        )
        assert isinstance(made.parsed_output, Fruit)
    assert len(run.calls) == 2
    run.check(leaves=1)
