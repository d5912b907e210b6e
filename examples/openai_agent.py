"""GRPO with an agent that knows nothing of sglrl: an agent of OpenAI's Agents SDK learns two tasks.

``pip install -e '.[sglang,gateway,demo]' openai-agents && python examples/openai_agent.py``. It
runs on a CPU, without a download. An optional argument sets the number of steps. The agent gets a
URL and a key, and its calls become token-exact trajectories. ``grpo.py`` explains the training.
"""

import asyncio
import random
import runpy
import sys
from pathlib import Path

import torch
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.rl import has_signal

GRPO = runpy.run_path(str(Path(__file__).parent / "grpo.py"))
MODEL, train = GRPO["MODEL"], GRPO["train"]
GROUPS, SAMPLES = 8, 16
set_tracing_disabled(True)  # it would send traces to OpenAI


async def ask_twice(base_url, api_key, first, second):
    """Ask the agent in two turns, and return its answers. Nothing here is sglrl's."""
    http = DefaultAsyncHttpxClient(verify=False)  # the URL is http: read no certificates
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        agent = Agent(name="clerk", model=OpenAIChatCompletionsModel("any", client))
        one = await Runner.run(agent, first)
        more = [*one.to_input_list(), {"role": "user", "content": second}]
        two = await Runner.run(agent, more)
    return one.final_output, two.final_output


async def agent(session, item):
    answers = await ask_twice(session.base_url, session.api_key, *item["questions"])
    right = [a == b for a, b in zip("".join(answers), "".join(item["questions"]), strict=False)]
    return sum(right) / 4


def items():
    chance = random.Random(0)
    while True:
        yield {"questions": ["".join(chance.choices("0123", k=2)) for _ in range(2)]}


async def main(steps):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    async with sglrl.launch(MODEL, device="cpu") as client:
        run = sglrl.rollout(
            client,
            agent,
            items(),
            gateway=True,
            max_new_tokens=2,
            group_size=SAMPLES,
            batch_size=GROUPS,
            max_staleness=0,
            keep=has_signal,
        )
        async with run:
            for step in range(steps):
                groups = await run.take(GROUPS, timeout=120)
                await asyncio.to_thread(train, model, optimizer, groups)
                await client.update_weights(model)
                reward = run.metrics.mean_reward
                print(f"step {step}: reward {reward:.2f}", flush=True)


if __name__ == "__main__":
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
