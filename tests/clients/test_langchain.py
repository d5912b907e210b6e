"""LangChain's ``ChatOpenAI``."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = HumanMessage("What is 2 + 3?")


class Fruit(BaseModel):
    """A fruit."""

    name: Literal["apple", "pear"]


@tool
def look_up(word: Literal["apple", "pear"]) -> str:
    """Look up a word."""
    return f"{word}: a fruit"


@pytest.mark.parametrize("responses", [True, False])
async def test_conversation(runs: Any, responses: bool) -> None:
    async with runs() as run:
        model = ChatOpenAI(
            model="any", base_url=run.base_url, api_key=run.api_key,
            stream_usage=True, use_responses_api=responses, extra_body={"regex": "[a-z]{4,12}"},
        )  # fmt: skip
        messages: list[Any] = [ASK]
        for _ in range(2):
            messages += [await model.ainvoke(messages), ASK]
        chunks = [chunk async for chunk in model.astream(messages)]
        whole = sum(chunks[1:], chunks[0])
        assert whole.usage_metadata["output_tokens"] >= 4
        await model.ainvoke([*messages, whole, ASK])
    assert len(run.calls) == 4
    run.check(leaves=1)


async def test_tools(runs: Any, biases: Any) -> None:
    async with runs() as run:
        model = ChatOpenAI(
            model="any", base_url=run.base_url, api_key=run.api_key, max_tokens=500,
            logit_bias=biases,
        )  # fmt: skip
        caller = model.bind_tools([look_up], tool_choice="any")
        messages: list[Any] = [ASK]
        for _ in range(2):
            said = await caller.ainvoke(messages)
            assert said.tool_calls
            messages.append(said)
            for call in said.tool_calls:
                made = await look_up.ainvoke(call)
                assert isinstance(made, ToolMessage)
                messages.append(made)
    assert len(run.calls) == 2
    run.check(leaves=1)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
async def test_structured_output(runs: Any, biases: Any, method: Any) -> None:
    async with runs() as run:
        model = ChatOpenAI(
            model="any", base_url=run.base_url, api_key=run.api_key, max_tokens=500,
            logit_bias=biases,
        )  # fmt: skip
        made = await model.with_structured_output(Fruit, method=method).ainvoke([ASK])
        assert isinstance(made, Fruit)
    assert len(run.calls) == 1
    run.check(leaves=1)
