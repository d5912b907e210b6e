"""Advantages and losses for policy gradients: plain functions of torch tensors, with their sources.

Enough for a trainer that can be read in one go (``examples/grpo.py``); not a training framework.
Tensors are [b, t]: b trajectories, t tokens each, as ``sglrl.rollouts.stack`` lays them out: what
stands at a token is about this token. Everything is computed in float32.
"""

from .advantages import group_advantages, has_signal, leave_one_out, turn_advantages
from .losses import (
    PolicyStats,
    importance_ratios,
    kl_estimate,
    masked_mean,
    policy_loss,
    reinforce_loss,
    token_entropies,
    token_logprobs,
)

__all__ = [
    "PolicyStats",
    "group_advantages",
    "has_signal",
    "importance_ratios",
    "kl_estimate",
    "leave_one_out",
    "masked_mean",
    "policy_loss",
    "reinforce_loss",
    "token_entropies",
    "token_logprobs",
    "turn_advantages",
]
