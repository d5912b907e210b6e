"""OpenAI's Agents SDK, with each of its two APIs."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from agents import (
    Agent,
    AgentHooks,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIProvider,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORD = ModelSettings(extra_body={"regex": "[a-z]{4,12}"})


class Fruit(BaseModel):
    name: Literal["apple", "pear"]


@function_tool
def look_up(word: Literal["apple", "pear"]) -> str:
    """Look up a word."""
    return f"{word}: a fruit"


def must_call(biases: Any) -> ModelSettings:
    return ModelSettings(tool_choice="required", max_tokens=500, extra_body={"logit_bias": biases})


def asked(made: Any) -> list[Any]:
    return [*made.to_input_list(), {"role": "user", "content": "And then?"}]


class CallsOnce(AgentHooks):  # type: ignore[type-arg]
    """Lets an agent that must call a tool answer with text afterwards."""

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: Any) -> None:
        agent.model_settings = WORD


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def api(request: Any) -> Any:
    return request.param


async def test_tools(runs: Any, biases: Any, api: Any) -> None:
    async with runs() as run, AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        agent = Agent(
            name="A",
            instructions="Be brief.",
            tools=[look_up],
            hooks=CallsOnce(),
            model=api("any", client),
            model_settings=must_call(biases),
        )
        made = await Runner.run(agent, "What is 2 + 3?")
    kinds = [item.type for item in made.new_items]
    assert kinds[-3:] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_stream(runs: Any, api: Any) -> None:
    async with runs() as run, AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        model = api("any", client)
        agent = Agent(name="A", tools=[look_up], model=model, model_settings=WORD)
        made = await Runner.run(agent, "What is 2 + 3?")
        made = Runner.run_streamed(agent, asked(made))
        events = [event async for event in made.stream_events()]
        assert any(event.type == "raw_response_event" for event in events)
        await Runner.run(agent, asked(made))
    assert len(run.calls) == 3
    run.check(leaves=1)


async def test_handoff(runs: Any, biases: Any, api: Any) -> None:
    """The second agent has other tools, which begins a branch."""
    async with runs() as run, AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        model = api("any", client)
        second = Agent(name="B", model=model, model_settings=WORD)
        first = Agent(name="A", handoffs=[second], model=model, model_settings=must_call(biases))
        made = await Runner.run(first, "What is 2 + 3?")
        assert made.last_agent is second
    assert len(run.calls) == 2
    run.check(leaves=2)


@pytest.mark.parametrize("responses", [True, False])
async def test_default_model(runs: Any, responses: bool) -> None:
    """The settings of the library's own model: an effort and a verbosity."""
    async with runs() as run, AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=responses)
        config = RunConfig(model_provider=provider, model_settings=WORD)
        made = await Runner.run(Agent(name="A"), "What is 2 + 3?", run_config=config)
        await Runner.run(Agent(name="A"), asked(made), run_config=config)
    wanted = {"reasoning", "text"} if responses else {"reasoning_effort", "verbosity"}
    assert wanted <= run.calls[0].body.keys()
    assert len(run.calls) == 2
    run.check(leaves=1)


async def test_output(runs: Any, api: Any) -> None:
    async with runs() as run, AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        model = api("any", client)
        agent = Agent(name="A", output_type=Fruit, model=model)
        made = await Runner.run(agent, "What is 2 + 3?")
        made = await Runner.run(agent, asked(made))
        assert isinstance(made.final_output, Fruit)
    assert len(run.calls) == 2
    run.check(leaves=1)
