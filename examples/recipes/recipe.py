"""What the recipes share: command-line options, a GRPO trainer, the asynchronous loop and a log.

Each recipe is a file beside this one. It defines the items and the agent, and calls ``learn``.
"""

import argparse
import asyncio
import csv
import json
import math
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import sglrl
from sglrl.rl import group_advantages, has_signal, policy_loss, token_logprobs
from sglrl.rollouts import stack

COLUMNS = (
    *("step", "seconds", "heldout", "reward", "staleness", "tokens_per_s", "update_ms"),
    *("loss", "norm", "kl", "clipped"),
)

OPTIONS = {
    "model": ("smollm2", "a folder, a name on the hub, or smollm2"),
    "device": ("auto", "cuda, cpu, or auto"),
    "steps": (100, "weight updates"),
    "groups": (32, "groups of each step"),
    "samples": (8, "samples of each group"),
    "signal": (1, "1: leave out groups with equal rewards, which have no gradient. 0: use them"),
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
    if chosen.device == "auto":
        chosen.device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen.output = Path(chosen.output or f"runs/{Path(parser.prog).stem}")
    return chosen


def engine_of(chosen):
    """Return the arguments of ``sglrl.launch``. On a GPU, leave most memory to the trainer."""
    memory = {"mem_fraction_static": 0.3} if chosen.device == "cuda" else {}
    return {"device": chosen.device} | memory | json.loads(chosen.engine)


class Log:
    """Writes numbers to ``log.csv`` and, if tensorboard is installed, for TensorBoard."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.begun, self.path = time.perf_counter(), folder / "log.csv"
        self.path.write_text(",".join(COLUMNS) + "\n")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.board = None
        else:
            self.board = SummaryWriter(folder)

    def write(self, step, **values):
        values = {"step": step, "seconds": time.perf_counter() - self.begun, **values}
        shown = {name: value for name, value in values.items() if not math.isnan(value)}
        with self.path.open("a", newline="") as file:
            row = {name: f"{value:.6g}" for name, value in shown.items()}
            csv.DictWriter(file, COLUMNS).writerow(row)
        print("  ".join(f"{name} {value:.4g}" for name, value in shown.items()), flush=True)
        if self.board is not None:
            for name, value in shown.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()


class Policy:
    """The trained model, with weights in float32, and its optimizer."""

    def __init__(self, chosen):
        torch.manual_seed(chosen.seed)
        model = AutoModelForCausalLM.from_pretrained(
            sglrl.local_model(chosen.model), dtype=torch.float32
        )
        self.model, self.device = model.to(chosen.device), chosen.device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr, betas=(0.9, 0.99))

    def train(self, groups):
        """Take one GRPO step over the groups of a batch. Return numbers for the log."""
        batch = stack(t for group in groups for t in group.trajectories).to(self.device)
        advantages = torch.cat([group_advantages(group.rewards) for group in groups])
        advantages = advantages.to(self.device)[batch["sample"]]  # a row for each branch
        sampled = batch["loss_mask"].sum()
        total = 0.0
        for rows in torch.arange(len(advantages)).split(64):
            part, sign = batch[rows], advantages[rows]
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
                attention = part["attention_mask"].long()
                logits = self.model(input_ids=part["input_ids"], attention_mask=attention).logits
            logprobs = token_logprobs(logits, part["input_ids"])
            loss, stats = policy_loss(logprobs, part["logprobs"], sign, part["loss_mask"])
            loss = loss * part["loss_mask"].sum() / sampled  # the mean over all tokens of the batch
            loss.backward()
            total += loss.item()
        return {"loss": total, "norm": self.step(), "kl": stats.kl, "clipped": stats.clipped}

    def step(self):
        """Take a step with the gradients of all parts. Return their norm before it is clipped."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


async def learn(chosen, agent, items, heldout, **arguments):
    """Start a pool and train a policy with it; see ``train``."""
    async with sglrl.launch(chosen.model, **engine_of(chosen)) as client:
        await train(client, chosen, agent, items, heldout, **arguments)


async def train(client, chosen, agent, items, heldout, policy=None, judge=None, **arguments):
    """Train a policy: sample with the weights of this step or the last one, train, and update.

    ``judge`` is the agent for the held-out items, if it is another one. ``arguments`` are further
    arguments of ``sglrl.rollout`` and ``sglrl.evaluate``, for example sampling parameters. The log,
    the held-out items and the trained model are in ``chosen.output``.
    """
    folder = chosen.output
    policy, log = policy or Policy(chosen), Log(folder)
    (folder / "heldout.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in heldout))

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
        keep=has_signal if chosen.signal else None,
        seed=chosen.seed,
        **arguments,
    )
    log.write(0, heldout=await score())
    async with run:
        for step in range(1, chosen.steps + 1):
            groups = await run.take(chosen.groups, timeout=600)
            stats = await asyncio.to_thread(policy.train, groups)
            report = await client.update_weights(policy.model)
            due = step % chosen.every == 0 or step == chosen.steps
            log.write(
                step,
                heldout=await score() if due else math.nan,
                reward=run.metrics.mean_reward,
                staleness=run.metrics.mean_staleness,
                tokens_per_s=run.metrics.step.tokens_per_second,
                update_ms=report.total_ms,
                **stats,
            )
    policy.model.to(torch.bfloat16).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(sglrl.local_model(chosen.model)).save_pretrained(folder / "model")
