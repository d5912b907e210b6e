"""Single-turn GRPO: a tiny model with random weights learns to repeat four digits.

Runs on a CPU, without a download: ``pip install -e '.[sglang,demo]' && python examples/grpo.py``.
An optional argument sets the number of steps. The model learns the task in about 40 steps. To train
your own model on your own questions, replace both and keep the rest.
"""

import asyncio
import random
import sys

import torch
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.rl import group_advantages, has_signal, policy_loss, token_logprobs
from sglrl.rollouts import stack

MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02))
GROUPS, SAMPLES = 16, 16


def questions():
    chance = random.Random(0)
    while True:
        text = "".join(chance.choices("0123456789", k=4))
        yield {"messages": [{"role": "user", "content": text}], "answer": text}


async def agent(session, item):
    """Generate one sample and return its reward."""
    turn = await session.generate(max_new_tokens=4)
    return sum(a == b for a, b in zip(turn.text, item["answer"], strict=False)) / 4


def train(model, optimizer, groups):
    """Take two steps over one batch. The second step is slightly off-policy, hence the clip."""
    batch = stack(t for group in groups for t in group.trajectories)
    advantages = torch.cat([group_advantages(group.rewards) for group in groups])
    advantages = advantages[batch["sample"]]  # a row for each branch
    for _ in range(2):
        attention = batch["attention_mask"].long()
        logits = model(input_ids=batch["input_ids"], attention_mask=attention).logits
        logprobs = token_logprobs(logits, batch["input_ids"])
        loss, stats = policy_loss(logprobs, batch["logprobs"], advantages, batch["loss_mask"])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return stats


async def main(steps):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    async with sglrl.launch(MODEL, device="cpu") as client:
        run = sglrl.rollout(
            client,
            agent,
            questions(),
            group_size=SAMPLES,
            batch_size=GROUPS,
            max_staleness=0,  # only samples of the current policy
            keep=has_signal,  # a group with equal rewards has no gradient
        )
        async with run:
            for step in range(steps):
                groups = await run.take(GROUPS, timeout=120)
                stats = await asyncio.to_thread(train, model, optimizer, groups)
                await client.update_weights(model)
                reward = run.metrics.mean_reward
                print(f"step {step}: reward {reward:.2f}, clipped {stats.clipped:.3f}", flush=True)


if __name__ == "__main__":
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
