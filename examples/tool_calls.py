"""An agent that calls tools, with a reward for each call.

``python examples/tool_calls.py [MODEL]`` needs a model that can call tools. The default is
downloaded once. ``tool_agent.py`` has a tool in a process of its own; ``grpo.py`` trains.
"""

import sys

import sglrl

QUESTIONS = [("How many eggs are in 4 boxes?", "24"), ("How many eggs are in 7 boxes?", "42")]


async def eggs_in_a_box() -> int:
    """Return how many eggs are in a box."""
    return 6


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


async def agent(session, item):
    # A grammar makes the first turn call this tool. After that the model decides.
    turn = await session.generate(tool_choice="eggs_in_a_box", max_new_tokens=64)
    for call in turn.tool_calls:
        result = str(await eggs_in_a_box())
        session.observe({"role": "tool", "tool_call_id": call.id, "content": result})
    turn = await session.run_tools([eggs_in_a_box, multiply], max_new_tokens=256)
    for made in session.turns:
        for call in made.tool_calls:
            session.reward(-0.1 if call.error else 0.0, "well-formed", call=call)
    correct = item["answer"] in turn.message.content
    return {"correct": float(correct), "turns": len(session.turns)}


async def main(model):
    items = [
        {"messages": [{"role": "user", "content": question}], "answer": answer}
        for question, answer in QUESTIONS
    ]
    async with sglrl.launch(model) as client:
        run = sglrl.rollout(
            client,
            agent,
            items,
            group_size=4,
            tools=[eggs_in_a_box, multiply],
            template={"enable_thinking": False},
            reward_weights={"turns": 0},  # only recorded
        )
        async with run:
            async for group in run:
                first = group.trajectories[0]
                calls = [
                    call["function"]
                    for message in first.messages
                    for call in message.get("tool_calls", ())
                ]
                print(group.rewards, first.named_rewards, calls, flush=True)


if __name__ == "__main__":
    sglrl.run(main(sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"))
