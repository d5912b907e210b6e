"""One of two ranks that take the same step as one policy that is not sharded, for test_recipes.py.

    torchrun --nproc-per-node 2 fsdp_program.py FOLDER_OF_THE_RECIPES MODEL OUTPUT SEED

Rank 0 saves both results, and prints the norms of both gradients.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist

import sglrl
from sglrl.rollouts import Turn, stack
from sglrl.weights import gather

recipes, model, output, seed = sys.argv[1:]
sys.path.insert(0, recipes)

from fsdp import Sharded  # noqa: E402
from recipe import Policy, options  # noqa: E402


def trajectory(chance: np.random.Generator) -> sglrl.Trajectory:
    """Return a random trajectory of one turn."""
    prompt, response = (chance.integers(5, 500, n, np.int32) for n in chance.integers(3, 12, 2))
    return sglrl.Trajectory(
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=np.ones(len(response), bool),
        logprobs=-chance.random(len(response), np.float32) * 8,
        versions=np.zeros(len(response), np.int32),
        turns=(Turn(start=0, stop=len(response)),),
    )


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    chosen = options("", [f"--model={model}", "--device=cpu", "--lr=0.01"])
    policy = Sharded(chosen)
    if dist.get_rank() != 0:
        policy.follow()
        return
    chance = np.random.default_rng(int(seed))
    # An odd number of rows, so that one rank has a row less.
    batch = stack([trajectory(chance) for _ in range(7)])
    advantages = torch.tensor(chance.standard_normal(7), dtype=torch.float32)
    tokens = batch["loss_mask"].sum().item()
    sharded = policy.take_step(batch, advantages.clone(), tokens)
    gather(policy.model)
    policy.save(f"{output}/sharded", model)
    whole = Policy(chosen)
    expected = whole.take_step(batch, advantages, tokens)
    whole.save(f"{output}/whole", model)
    print(json.dumps([sharded["norm"], expected["norm"]]))


if __name__ == "__main__":
    main()
