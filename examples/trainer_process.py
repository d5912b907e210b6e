"""GRPO with the trainer in its own process. The driver only runs the rollouts.

``pip install -e '.[sglang,demo]' && python examples/trainer_process.py [steps]`` runs on a CPU
without a download. The trainer is an actor, so this script starts it. Any other program can do the
same with ``client.weights_address``. It sends the weights straight to the engines.
"""

import asyncio
import random
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.rl import group_advantages, has_signal, policy_loss, token_logprobs
from sglrl.rollouts import stack
from sglrl.weights import Sender

MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02))
SIZES = {"group_size": 16, "batch_size": 16, "max_staleness": 1}


class Trainer(sglrl.Actor):
    def __init__(self, weights_address: str) -> None:
        self.address = weights_address
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, betas=(0.9, 0.95))

    async def open(self) -> None:
        self.sender = await Sender.connect(self.address)

    async def close(self) -> None:
        await self.sender.close()

    @sglrl.endpoint
    async def step(self, arrays: dict[str, np.ndarray]) -> int:
        await asyncio.to_thread(self.train, arrays)
        return (await self.sender.update(self.model)).version

    def train(self, arrays: dict[str, np.ndarray]) -> None:
        batch = {name: torch.tensor(array) for name, array in arrays.items()}
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
        new = token_logprobs(logits, batch["input_ids"])
        loss, _ = policy_loss(new, batch["logprobs"], batch["advantages"], batch["loss_mask"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def questions():
    while True:
        text = "".join(random.choices("0123456789", k=4))
        yield {"messages": [{"role": "user", "content": text}], "answer": text}


async def agent(session, item):
    turn = await session.generate(max_new_tokens=4)
    return sum(a == b for a, b in zip(turn.text, item["answer"], strict=False)) / 4


async def main(steps):
    async with (
        sglrl.launch(MODEL, device="cpu") as client,
        sglrl.spawn(Trainer, client.weights_address, start_timeout=300.0) as trainer,
        sglrl.rollout(client, agent, questions(), keep=has_signal, **SIZES) as run,
    ):
        for _ in range(steps):
            groups = await run.take(run.batch_size, timeout=120)
            batch = stack(t for group in groups for t in group.trajectories)
            batch["advantages"] = torch.cat([group_advantages(group.rewards) for group in groups])
            version = await trainer.step({name: value.numpy() for name, value in batch.items()})
            print(f"weights {version}: reward {run.metrics.mean_reward:.2f}", flush=True)


if __name__ == "__main__":
    sglrl.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 60))
