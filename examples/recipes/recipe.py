"""What the recipes share: command-line options, a GRPO trainer and the asynchronous loop.

Each recipe is a file beside this one. It defines the items and the agent, and calls ``learn``.
"""

import argparse
import asyncio
import json
import math
from pathlib import Path
from statistics import fmean

import tensordict  # noqa: F401 (of the extra recipes; missing packages are found before the start)
import torch
from log import Log
from transformers import AutoModelForCausalLM, AutoTokenizer

import sglrl
from sglrl.rl import group_advantages, has_signal, policy_loss, token_logprobs
from sglrl.rollouts import stack

OPTIONS = {
    "model": ("smollm2", "a folder, a name on the hub, or smollm2"),
    "device": ("auto", "cuda, cpu, or auto"),
    "steps": (100, "weight updates"),
    "groups": (32, "groups of each step"),
    "samples": (8, "samples of each group"),
    "filter": (0, "1: replace groups with equal rewards, which have no gradient. 0: use them"),
    "lr": (2e-5, "learning rate"),
    "seed": (0, "seed of the items, the samples and torch"),
    "every": (10, "steps between evaluations"),
    "heldout": (64, "held-out items"),
    "engine": ("{}", "more arguments of sglrl.launch, as JSON"),
    "output": ("", "folder of the log and the trained model (default: runs/RECIPE)"),
}


def options(about, arguments=None, more=None, **defaults):
    """Return the command-line options of a recipe: with other ``defaults``, and with ``more``."""
    parser = argparse.ArgumentParser(description=about)
    for name, (value, text) in (OPTIONS | (more or {})).items():
        value = defaults.get(name, value)
        shown = "" if value == "" else f" (default: {value})"
        parser.add_argument(f"--{name}", default=value, type=type(value), help=text + shown)
    chosen = parser.parse_args(arguments)
    for name in ("steps", "groups", "every", "heldout"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if chosen.samples < 2:
        parser.error("--samples must be at least 2, because a sample is compared with others")
    if chosen.filter not in (0, 1):
        parser.error("--filter is 0 or 1")
    try:
        chosen.engine = dict(json.loads(chosen.engine))
    except (ValueError, TypeError):
        parser.error("--engine must be a JSON object, such as '{\"mem_fraction_static\": 0.5}'")
    if chosen.device == "auto":
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen.output = Path(chosen.output or f"runs/{Path(parser.prog).stem}")
    if (chosen.output / "log.csv").exists():
        parser.error(f"{chosen.output} has the log of another run: choose another --output")
    return chosen


def engine_of(chosen):
    """Return the arguments of ``sglrl.launch``. On a GPU, leave most memory to the trainer."""
    memory = {"mem_fraction_static": 0.3} if chosen.device == "cuda" else {}
    return {"device": chosen.device} | memory | chosen.engine


class Policy:
    """The trained model, with weights in float32, and its optimizer."""

    def __init__(self, chosen):
        torch.manual_seed(chosen.seed)
        model = AutoModelForCausalLM.from_pretrained(
            sglrl.local_model(chosen.model), dtype=torch.float32
        )
        self.device, self.model = chosen.device, self.place(model.to(chosen.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=chosen.lr, betas=(0.9, 0.99))

    def place(self, model):
        """Return the model as it is trained. Recipe 5 shards it here."""
        return model

    def train(self, groups):
        """Take one GRPO step over the groups of a batch. Return numbers for the log."""
        batch = stack(t for group in groups for t in group.trajectories)
        advantages = torch.cat([group_advantages(group.rewards) for group in groups])
        # A trajectory has a row for each of its branches.
        return self.take_step(batch, advantages[batch["sample"]], batch["loss_mask"].sum().item())

    def take_step(self, batch, advantages, tokens):
        """Take a step. The loss is a sum over all sampled tokens, divided by ``tokens``."""
        total = 0.0
        for rows in self.parts(batch):
            part, sign = batch[rows].to(self.device), advantages[rows].to(self.device)
            begin, logits = self.logits(part)
            old, mask = part["logprobs"][:, begin:], part["loss_mask"][:, begin:]
            logprobs = token_logprobs(logits, part["input_ids"][:, begin:])
            mean, stats = policy_loss(logprobs, old, sign, mask)
            loss = mean * mask.sum() / tokens
            loss.backward()
            total += loss.item()
        return {"loss": total, "norm": self.step(), "kl": stats.kl, "clipped": stats.clipped}

    def parts(self, batch):
        """Return the indices of rows that are trained on at a time."""
        rows, width = batch["input_ids"].shape
        # The activations of 20,000 tokens of SmolLM2-135M take 25 GB.
        tokens = 20_000 if self.device == "cuda" else 1_000
        return torch.arange(rows).split(max(1, tokens // width))

    def logits(self, batch):
        """Return the position before the first sampled token of any row, and the logits from it."""
        begin = batch["loss_mask"].any(0).nonzero()[0].item() - 1
        ids, attention = batch["input_ids"], batch["attention_mask"].long()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            made = self.model(ids, attention, logits_to_keep=ids.shape[1] - begin)
        return begin, made.logits.float()

    def step(self):
        """Take a step with the gradients of all parts. Return their norm before it is clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def save(self, folder, tokenizer):
        """Save the model in bfloat16, with the tokenizer of a folder."""
        self.model.to(torch.bfloat16).save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


async def learn(chosen, agent, items, heldout, **arguments):
    """Start a pool and train a policy with it; see ``train``."""
    async with sglrl.launch(chosen.model, **engine_of(chosen)) as client:
        await train(client, chosen, agent, items, heldout, **arguments)


async def train(
    client, chosen, agent, items, heldout, policy=None, judge=None, log=None, **arguments
):
    """Train a policy: sample with the weights of this step or the last one, train, and update.

    ``judge`` is the agent for the held-out items, if it is another one. ``log`` replaces the
    ``Log``. ``arguments`` are further arguments of ``sglrl.rollout`` and ``sglrl.evaluate``, for
    example sampling parameters. The log, the held-out items and the trained model are in
    ``chosen.output``.
    """
    folder = chosen.output
    policy, log = policy or Policy(chosen), log or Log(folder)
    lines = "".join(f"{json.dumps(item)}\n" for item in heldout)
    (folder / "heldout.jsonl").write_text(lines, encoding="utf-8")

    async def score():
        result = await sglrl.evaluate(
            client, heldout, agent=judge or agent, samples=4, seed=1, **arguments
        )
        return result.mean_score

    run = sglrl.rollout(
        client,
        agent,
        items,
        group_size=chosen.samples,
        batch_size=chosen.groups,
        max_staleness=1,
        keep=has_signal if chosen.filter else None,
        seed=chosen.seed,
        **arguments,
    )
    log.write(0, heldout=await score())
    async with run:
        for step in range(1, chosen.steps + 1):
            groups = await run.take(chosen.groups, timeout=600)
            trained = [t for group in groups for t in group.trajectories]
            stats = await asyncio.to_thread(policy.train, groups)
            report = await client.update_weights(policy.model)
            due = step % chosen.every == 0 or step == chosen.steps
            log.write(
                step,
                heldout=await score() if due else math.nan,
                reward=fmean(t.reward for t in trained),
                staleness=fmean(group.staleness for group in groups),
                tokens_per_s=run.metrics.step.tokens_per_second,
                update_ms=report.total_ms,
                **stats,
            )
    policy.save(folder / "model", sglrl.local_model(chosen.model))
    print(f"the log and the model are in {folder}")
