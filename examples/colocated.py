"""GRPO on one GPU: the engine sleeps while the trainer uses its memory.

Without a GPU it runs on a CPU: ``pip install -e '.[sglang,demo]' && python examples/colocated.py``.
An optional argument sets the number of steps.
"""

import asyncio
import random
import sys

import torch
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.rl import group_advantages, has_signal, policy_loss, token_logprobs
from sglrl.rollouts import stack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02, hidden_size=256))
ENGINE = {"dtype": "bfloat16", "mem_fraction_static": 0.5} if DEVICE == "cuda" else {}
GROUPS, SAMPLES = 16, 16


def questions():
    chance = random.Random(0)
    while True:
        text = "".join(chance.choices("0123456789", k=4))
        yield {"messages": [{"role": "user", "content": text}], "answer": text}


async def agent(session, item):
    turn = await session.generate(max_new_tokens=4)
    return sum(a == b for a, b in zip(turn.text, item["answer"], strict=False)) / 4


def train(model, optimizer, groups):
    batch = stack(t for group in groups for t in group.trajectories).to(DEVICE)
    advantages = torch.cat([group_advantages(group.rewards) for group in groups])
    advantages = advantages.to(DEVICE)[batch["sample"]]
    attention = batch["attention_mask"].long()
    logits = model(input_ids=batch["input_ids"], attention_mask=attention).logits
    logprobs = token_logprobs(logits.float(), batch["input_ids"])
    loss, _ = policy_loss(logprobs, batch["logprobs"], advantages, batch["loss_mask"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def used():
    """Return the memory in use on the GPU, by all processes, in GB."""
    free, total = torch.cuda.mem_get_info() if DEVICE == "cuda" else (0, 0)
    return (total - free) / 1e9


async def main(steps):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    options = {"group_size": SAMPLES, "batch_size": GROUPS, "max_staleness": 0, "keep": has_signal}
    async with (
        sglrl.launch(MODEL, device=DEVICE, enable_memory_saver=True, **ENGINE) as client,
        sglrl.rollout(client, agent, questions(), **options) as run,
    ):
        for step in range(steps):
            groups = await run.take(GROUPS, timeout=120)
            await client.sleep(keep_weights=False)  # the trainer sends new ones
            await asyncio.to_thread(train, model, optimizer, groups)
            torch.cuda.empty_cache()  # the engine needs this memory
            asleep = used()
            await client.wake(["weights"])
            await client.update_weights(model)
            await client.wake(["kv_cache"])
            reward = run.metrics.mean_reward
            print(f"step {step}: reward {reward:.2f}, {asleep:.1f} GB, then {used():.1f} GB")


if __name__ == "__main__":
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
