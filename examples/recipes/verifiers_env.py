"""GRPO on an environment of verifiers: a small model learns to repeat a word and nothing else.

The taskset, its rewards and its harness are verifiers' own. SGLang needs another version of openai
than verifiers, so the engine runs in another environment, whose Python is an option::

    pip install 'sglrl[sglang]'                                       # in one environment
    pip install 'sglrl[gateway,verifiers,smollm2]' tensordict torch uv  # in another one
    python examples/recipes/verifiers_env.py --python ONE/bin/python --steps 3

The harness "null" starts a process for each sample, which takes a second of a core.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import verifiers.v1 as vf
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.integrations.verifiers import VerifiersEnv
from sglrl.rl import group_advantages, has_signal, policy_loss, token_logprobs
from sglrl.rollouts import stack

# verifiers imports this file by its name, and takes the taskset from it.
__all__ = ["WordTaskset"]

WORDS = ["river", "stone", "candle", "window", "garden", "pencil", "mirror", "bridge"]
GROUPS, SAMPLES = 2, 4


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def repeats(self, trace: vf.Trace) -> float:
        return float(self.data.word in trace.last_reply.lower())

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return len(self.data.word) / max(len(trace.last_reply), len(self.data.word))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordTaskset(vf.Taskset[WordTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        chance = random.Random(0)
        while True:
            word = chance.choice(WORDS)
            prompt = f"Repeat this word and write nothing else: {word}"
            yield WordTask(WordData(prompt=prompt, word=word), self.config.task)


ENVIRONMENT = {
    "taskset": {"id": Path(__file__).stem},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


def train(model, optimizer, groups):
    """Take one step over one batch."""
    batch = stack(t for group in groups for t in group.trajectories).to(model.device)
    advantages = torch.cat([group_advantages(group.rewards) for group in groups])
    advantages = advantages.to(model.device)[batch["sample"]]  # a row for each branch
    attention = batch["attention_mask"].long()
    logits = model(input_ids=batch["input_ids"], attention_mask=attention).logits
    logprobs = token_logprobs(logits, batch["input_ids"])
    loss, _ = policy_loss(logprobs, batch["logprobs"], advantages, batch["loss_mask"])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def mean_of(groups, name):
    """Return the mean of a metric of verifiers. A trajectory has the metrics of each trace."""
    records = [t.metadata["traces"][0] for group in groups for t in group.trajectories]
    return sum(record["metrics"][name] for record in records) / len(records)


async def learn(client, model, args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    env = VerifiersEnv(ENVIRONMENT)
    run = sglrl.rollout(
        client,
        env.agent,
        env.tasks(),
        gateway=True,  # the harness sends requests
        group_size=SAMPLES,
        batch_size=GROUPS,
        max_staleness=0,  # only samples of the current policy
        keep=has_signal,  # a group with equal rewards has no gradient
        max_new_tokens=24,
        timeout=300,
        seed=args.seed,
    )
    async with run:
        for step in range(args.steps):
            groups = await run.take(GROUPS, timeout=600)
            await asyncio.to_thread(train, model, optimizer, groups)
            with TemporaryDirectory() as folder:  # for update_weights, both need the same torch
                await asyncio.to_thread(model.save_pretrained, folder)
                await client.update_weights_from_disk(folder)
            reward = float(sum(group.rewards.mean() for group in groups) / GROUPS)
            line = {"step": step, "reward": reward, "characters": mean_of(groups, "characters")}
            print(f"step {step}: reward {reward:.2f}, {line['characters']:.0f} characters")
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")


async def main(args):
    torch.manual_seed(args.seed)
    folder = sglrl.local_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(args.device)
    async with sglrl.launch(folder, device=args.device, python=args.python) as client:
        await learn(client, model, args)


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a folder, or a name on the hub")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for a JSON line of each step")
    parser.add_argument("--python", help="the Python of the environment with SGLang")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sglrl.run(main(options()))
