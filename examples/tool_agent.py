"""An agent with a tool, and a verifier for its reward, both in processes of their own.

``python examples/tool_agent.py [conversations]``, on a CPU and without a download. The model is a
tiny one with random weights, so most of what it writes is nonsense: see what becomes of it. How to
train on the trajectories: ``examples/grpo.py``.
"""

import asyncio
import sys

import sglrl
from sglrl.tools.tiny_model import tiny_model

MODEL = str(tiny_model(characters="0123456789+-*/()= ?", initializer_range=0.02))


class Calculator(sglrl.Actor):
    """Runs what a model wrote, where it can do no harm: in a process with little memory. What it
    must not live through (9**9**9) ends the process, and another one takes its place."""

    def __init__(self) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    @sglrl.endpoint
    async def evaluate(self, expression: str) -> str:
        if not set(expression) <= set("0123456789+-*/() "):
            raise ValueError("only digits, + - * / and brackets")
        return str(eval(expression, {"__builtins__": {}}))[:16]


class Verifier(sglrl.Actor):
    """Says what an answer is worth."""

    @sglrl.endpoint(idempotent=True)
    async def score(self, question: str, answer: str) -> float:
        left, right = question.split("+")
        return float(answer.strip() == str(int(left) + int(right)))


async def main(conversations):
    async with (
        sglrl.launch(MODEL, device="cpu") as client,
        # One call at a time in each process, so what crashes or hangs one (it is ended after two
        # seconds) is lost to nobody else; calls wait at the driver for a process that is free.
        sglrl.spawn(Calculator, replicas=2, window=1, hang_timeout=2.0, restarts=1000) as tool,
        sglrl.spawn(Verifier) as verifier,
    ):

        async def agent(session, item):
            call = await session.generate(max_new_tokens=8)
            try:
                result = await tool.evaluate(call.text, timeout=10.0)
                session.reward(0.1)
            except (sglrl.RemoteError, sglrl.WorkerLost, sglrl.DeadlineExceeded) as error:
                # What went wrong with the tool is something the policy can learn from.
                result = "?"
                session.metadata["error"] = type(error).__name__
            session.observe({"role": "tool", "content": result})
            answer = await session.generate(max_new_tokens=4)
            return await verifier.score(item["question"], answer.text)

        items = [
            {"messages": [{"role": "user", "content": text}], "question": text}
            for text in (f"{i}+{7 * i % 10}" for i in range(conversations))
        ]
        async for group in sglrl.rollout(client, agent, items, group_size=4, timeout=60.0):
            first = group.trajectories[0]
            what = client.tokenizer.decode(first.input_ids.tolist())
            rewards = [round(reward, 2) for reward in group.rewards.tolist()]
            print(rewards, what, first.metadata.get("error", ""), flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
