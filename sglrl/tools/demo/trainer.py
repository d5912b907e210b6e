"""The trainer: GRPO with a clipped, token-level loss, on one thread of the driver's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...rl import (
    PolicyStats,
    masked_mean,
    policy_loss,
    token_entropies,
    token_logprobs,
    turn_advantages,
)
from ...rollouts import Group, stack

EPOCHS = 2
LEARNING_RATE = 2e-3
FULL_RATE_STEPS = 40
"""After this many steps, the learning rate falls as 1 / step. At the full rate, a policy that has
learnt a task can lose it again."""
ENTROPY_BONUS = 0.02
"""Weight of the entropy in the loss, so that a policy does not stop at the first good answer."""


class TrainStats(NamedTuple):
    """The statistics of one ``Trainer.step``.

    Attributes:
        policy: the statistics of the policy loss in the last epoch.
        entropy: mean entropy of the policy, in nats per sampled token.
        seconds: duration of the step.
    """

    policy: PolicyStats
    entropy: float
    seconds: float


class Trainer:
    """Holds and trains the policy.

    ``versions[v]`` holds the weights of policy version v. ``replay`` checks tokens with them.
    """

    def __init__(self, folder: str, seed: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        # The other cores are left to the engines.
        torch.set_num_threads(1)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.rates = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, FULL_RATE_STEPS / (done + 1))
        )
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self.remember(0)

    def remember(self, version: int) -> None:
        """Store a copy of the current weights as this version."""
        self.versions[version] = {k: v.clone() for k, v in self.model.state_dict().items()}

    def step(self, groups: Sequence[Group]) -> TrainStats:
        """Train on a batch.

        The samples may come from older policy versions than the present weights. The ratio of the
        loss is therefore relative to the logprobs with which the tokens were sampled.
        """
        begun = time.perf_counter()
        batch = stack([t for group in groups for t in group.trajectories])
        # Each turn has an advantage of its own, so that the quality of the first turn does not
        # affect the second. With one advantage for both turns, some runs learn to call the tool
        # perfectly but always give the same answer. Advantages are not divided by the standard
        # deviation. If nearly all samples are right, the division exaggerates the other samples,
        # and some runs keep a mistake forever.
        sizes = [len(group.trajectories) for group in groups]
        advantages = turn_advantages(batch["rewards"], batch["turn_ids"], sizes, normalize=False)
        ids, mask = batch["input_ids"], batch["loss_mask"]
        for _ in range(EPOCHS):
            logits = self.model(
                input_ids=ids, attention_mask=batch["attention_mask"].long(), use_cache=False
            ).logits
            loss, stats = policy_loss(
                token_logprobs(logits, ids), batch["logprobs"], advantages, mask
            )
            entropy = masked_mean(token_entropies(logits), mask)
            self.optimizer.zero_grad()
            (loss - ENTROPY_BONUS * entropy).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.rates.step()
        return TrainStats(stats, float(entropy.detach()), time.perf_counter() - begun)
