"""Asynchronous, off-policy training with samples up to two versions old and a replay buffer.

``pip install -e '.[sglang,torchrl]' && python examples/async_offpolicy.py [steps]`` runs on a CPU
without a download. A tiny model learns to repeat four digits; its reward is 0.9 after 80 steps.
"""

import asyncio
import random
import sys

import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.rl import has_signal, leave_one_out, policy_loss, token_logprobs
from sglrl.rollouts import stack

MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02))
GROUPS, SAMPLES, WIDTH = 16, 16, 16


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
    batch = buffer.sample(GROUPS * SAMPLES)
    advantages, mask, behavior = (batch[k] for k in ("advantage", "loss_mask", "logprobs"))
    # The clip is relative to the policy before both steps. A token has the weight start / sampled.
    with torch.no_grad():
        start = logprobs_of(model, batch)
    for _ in range(2):
        loss, _ = policy_loss(logprobs_of(model, batch), start, advantages, mask, behavior=behavior)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


async def main(steps):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    # The storage holds one batch: new samples overwrite old ones. Each trajectory is drawn once.
    storage, sampler = LazyTensorStorage(GROUPS * SAMPLES), SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=storage, sampler=sampler)
    whole = {"group_size": SAMPLES, "min_group": SAMPLES, "batch_size": GROUPS, "max_staleness": 2}
    async with (
        sglrl.launch(MODEL, device="cpu") as client,
        sglrl.rollout(client, agent, questions(), keep=has_signal, **whole) as run,
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
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 80))
