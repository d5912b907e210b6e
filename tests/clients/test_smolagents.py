"""The agents of smolagents: one writes calls of tools, the other writes code.

Both rewrite their own answers before they send them back, so each step begins a branch.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool

pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE = r"Thought: [a-z]{4,9}\n<code>\n(print|final_answer)\(add\([0-9], [0-9]\)\)\n</code>"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def answer_of(agent_class: Any, run: Any, options: dict[str, Any]) -> Any:
    model = OpenAIServerModel("any", api_base=run.base_url, api_key=run.api_key, **options)
    agent = agent_class(tools=[add], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
    return agent.run("What is 2 + 3?", return_full_result=True)


async def test_an_agent_that_calls_tools(runs: Any, biases: Any) -> None:
    options = {"max_tokens": 600, "logit_bias": biases}
    async with runs() as run:
        made = await asyncio.to_thread(answer_of, ToolCallingAgent, run, options)
    steps = [step for step in made.steps if step.get("model_output_message")]
    # What the library has parsed. A random answer can be one that the agent refuses to execute, for
    # example two calls of "final_answer".
    calls = [step["model_output_message"]["tool_calls"] for step in steps]
    assert all(calls)
    ids = [call["id"] for of_step in calls for call in of_step]
    assert len(set(ids)) == len(ids)
    assert run.calls[0].body["tool_choice"] == "required"
    assert "stop" in run.calls[0].body
    # If no step calls the tool "final_answer", the agent asks for an answer once more.
    assert len(run.calls) == len(steps) + (made.state != "success")
    run.check(leaves=len(run.calls))


async def test_an_agent_that_writes_code(runs: Any) -> None:
    options = {"extra_body": {"regex": CODE}}
    async with runs() as run:
        made = await asyncio.to_thread(answer_of, CodeAgent, run, options)
    steps = [step for step in made.steps if step.get("model_output_message")]
    assert all(step["code_action"].startswith(("print", "final")) for step in steps)
    assert len(run.calls) == len(steps) + (made.state != "success")
    run.check(leaves=len(run.calls))
