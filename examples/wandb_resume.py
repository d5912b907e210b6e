"""Training that continues after a crash, with metrics in W&B.

``pip install -e '.[sglang,demo]' wandb && WANDB_MODE=offline python examples/wandb_resume.py DIR``
runs on a CPU without a download. The same command continues where it was killed. The checkpoint is
one file with the model, the optimizer and the finished items. It is replaced in one step, so no
item is lost or used twice. A program that does not train needs no checkpoint:
``run.save(path)`` and ``rollout(state=path)`` keep the finished items.
"""

import asyncio
import os
import sys
from pathlib import Path

import torch
import wandb
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.rl import group_advantages, policy_loss, token_logprobs
from sglrl.rollouts import stack

MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02))
ITEMS = [{"prompt": f"{i:04}", "answer": f"{i:04}"} for i in range(0, 6400, 100)]


async def agent(session, item):
    turn = await session.generate(max_new_tokens=4)
    return sum(a == b for a, b in zip(turn.text, item["answer"], strict=False)) / 4


def train(model, optimizer, groups):
    batch = stack(t for group in groups for t in group.trajectories)
    advantages = torch.cat([group_advantages(group.rewards) for group in groups])
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    logprobs = token_logprobs(logits, batch["input_ids"])
    loss, _ = policy_loss(logprobs, batch["logprobs"], advantages, batch["loss_mask"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def load(path, model, optimizer):
    """Load the checkpoint, if there is one. Return the last step and the state of the run."""
    if not path.exists():
        return 0, None
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["run"]


async def main(folder):
    path = Path(folder, "checkpoint.pt")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step, state = load(path, model, optimizer)
    # The same id continues the same W&B run.
    wandb.init(project="sglrl", id="resume-example", resume="allow", dir=folder)
    async with sglrl.launch(MODEL, device="cpu") as client:
        await client.update_weights(model)
        run = sglrl.rollout(client, agent, ITEMS, group_size=8, batch_size=8, state=state)
        async with run:
            async for groups in run.batches():
                await asyncio.to_thread(train, model, optimizer, groups)
                await client.update_weights(model)
                step += 1
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "step": step, "run": run.state_dict()}, f"{path}.new")
                os.replace(f"{path}.new", path)
                wandb.log(run.metrics.flat(), step=step)
                print(f"step {step}: items {[group.index for group in groups]}", flush=True)
    wandb.finish()


if __name__ == "__main__":
    sglrl.run(main(sys.argv[1]))
