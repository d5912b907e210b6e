"""An agent with a tool, and a verifier that computes its reward. Both have their own processes.

``python examples/tool_agent.py [conversations]`` runs on a CPU without a download. The model is
tiny and has random weights, so most of its output is nonsense. The example shows how the tool
handles that output. ``examples/grpo.py`` shows how to train on the trajectories.
"""

import sys

import sglrl

MODEL = str(sglrl.tiny_model(characters="0123456789+-*/()= ?", initializer_range=0.02))


class Calculator(sglrl.Actor):
    """Evaluate expressions that a model wrote, in a process with limited memory.

    An expression that exceeds the limits (9**9**9) kills the process. A new process replaces it.
    """

    def __init__(self) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    @sglrl.endpoint
    async def evaluate(self, expression: str) -> str:
        if not set(expression) <= set("0123456789+-*/() "):
            raise ValueError("only digits, + - * / and brackets")
        return str(eval(expression, {"__builtins__": {}}))[:16]


class Verifier(sglrl.Actor):
    """Score answers."""

    @sglrl.endpoint(idempotent=True)
    async def score(self, question: str, answer: str) -> float:
        left, right = question.split("+")
        return float(answer.strip() == str(int(left) + int(right)))


async def main(conversations):
    async with (
        sglrl.launch(MODEL, device="cpu") as client,
        # Each process runs one call at a time, so a crash or a hang loses only that call. A process
        # that hangs is killed after two seconds. Calls wait at the driver for a free process.
        sglrl.spawn(Calculator, replicas=2, window=1, hang_timeout=2.0, restarts=1000) as tool,
        sglrl.spawn(Verifier) as verifier,
    ):

        async def agent(session, item):
            call = await session.generate(max_new_tokens=8)
            try:
                result = await tool.evaluate(call.text, timeout=10.0)
                session.reward(0.1)
            except (sglrl.RemoteError, sglrl.WorkerLost, sglrl.DeadlineExceeded) as error:
                # The policy can learn from a failed tool call.
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
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 16))
