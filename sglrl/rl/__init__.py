"""Advantages and losses for policy gradients, as plain functions of torch tensors.

The docstrings cite the papers. These functions suffice for a short trainer
(``examples/grpo.py``). They are not a training framework.

Tensors are [b, t], for b trajectories with t tokens each, in the layout of
``sglrl.rollouts.stack``. Values are not shifted: the value at position i belongs to token i.
Everything is computed in at least float32.
"""

from .advantages import group_advantages, has_signal, leave_one_out, turn_advantages
from .losses import (
    PolicyStats,
    apply_sampling_mask,
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
    "apply_sampling_mask",
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
