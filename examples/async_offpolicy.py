"""Asynchronous, off-policy training: samples up to two versions old, through a replay buffer.

``pip install -e '.[sglang,torchrl]' && python examples/async_offpolicy.py [steps]``, on a CPU and
without a download. A tiny model with random weights learns to repeat four digits (some 60 steps).
"""

import asyncio
import random
import sys

import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.demo.tiny import tiny_model
from sglrl.rl import leave_one_out, policy_loss, token_logprobs
from sglrl.rollout import stack

MODEL = str(tiny_model(characters="0123456789", initializer_range=0.02))
GROUPS, SAMPLES, STALENESS, WIDTH = 16, 16, 2, 16


def questions():
    chance = random.Random(0)
    while True:
        text = "".join(chance.choices("0123456789", k=4))
        yield {"messages": [{"role": "user", "content": text}], "answer": text}


async def agent(session, item):
    turn = await session.generate(max_new_tokens=4)
    return sum(a == b for a, b in zip(turn.text, item["answer"], strict=False)) / 4


def logprobs_of(model, batch):
    attention = batch["attention_mask"].long()
    logits = model(input_ids=batch["input_ids"], attention_mask=attention).logits
    return token_logprobs(logits, batch["input_ids"])


def train(model, optimizer, buffer):
    for _ in range(2):
        batch = buffer.sample(GROUPS * SAMPLES)
        with torch.no_grad():
            proximal = logprobs_of(model, batch)
        advantages, mask, behavior = (batch[k] for k in ("advantage", "loss_mask", "logprobs"))
        # Clipped around the policy of now; each token weighed by now / when it was sampled.
        new = logprobs_of(model, batch)
        loss, _ = policy_loss(new, proximal, advantages, mask, behavior=behavior)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


async def main(steps):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    # Of one batch: what is older is overwritten.
    buffer = ReplayBuffer(storage=LazyTensorStorage(GROUPS * SAMPLES))
    sizes = {"group_size": SAMPLES, "batch_size": GROUPS, "max_staleness": STALENESS}
    async with (
        sglrl.launch(MODEL, device="cpu") as client,
        sglrl.rollout(client, agent, questions(), **sizes) as run,
    ):
        for step in range(steps):
            for group in await run.take(GROUPS, timeout=120):
                batch = stack(group.trajectories, pad_to=WIDTH)
                buffer.extend(batch.set("advantage", leave_one_out(group.rewards)))
            await asyncio.to_thread(train, model, optimizer, buffer)
            await client.update_weights(model)
            reward, age = run.metrics.mean_reward, run.metrics.mean_staleness
            print(f"step {step}: reward {reward:.2f}, {age:.2f} versions old", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
