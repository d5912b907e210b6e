"""How much better a sample was than the others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UsageError


class HasRewards(Protocol):
    """Such as a ``Group``."""

    @property
    def rewards(self) -> Any: ...


def group_advantages(rewards: Any, *, normalize: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Each reward less its group's mean, over the group's standard deviation: GRPO, section 4.1.2
    of arXiv:2402.03300.

    Args:
        rewards: [n] of one group, or [g, n] of g groups; tensor, array or sequence.
        normalize: False leaves out the division, which weighs groups by how little their rewards
            differ: Dr. GRPO, arXiv:2503.20783.
        epsilon: added to the standard deviation (of n, not n - 1).

    Returns:
        float32, of the same shape. All 0 in a group whose rewards are equal.

    Raises:
        UsageError: wrong shape.
    """
    centred = _centred(_groups(rewards, 1))
    if normalize:
        centred = centred / (centred.square().mean(-1, keepdim=True).sqrt() + epsilon)
    return centred.float()


def turn_advantages(
    rewards: Tensor,
    turn_ids: Tensor,
    group_sizes: Sequence[int],
    *,
    normalize: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """What a turn earned, and the turns after it, less the mean of that over the same turn of its
    group, over the standard deviation: a turn is neither praised nor blamed for what came before
    it. For conversations whose turns are rewarded one by one (arXiv:2505.11821 has what becomes of
    agents whose turns all share their trajectory's advantage). In a group of single turns it is
    ``group_advantages``.

    Args:
        rewards: float [b, t], and
        turn_ids: int64 [b, t]: as ``sglrl.rollouts.stack`` has them, in either padding, the
            trajectories of a group one after the other.
        group_sizes: how many trajectories each group has, as ``len(group.trajectories)``.
        normalize, epsilon: as ``group_advantages``.

    Returns:
        float32 [b, t]: the turn's at each of its tokens, elsewhere 0. All 0 for a turn that one
        trajectory of a group alone has come to.

    Raises:
        UsageError: wrong shapes, or groups that are not as large as the batch.
    """
    if rewards.dim() != 2 or rewards.shape != turn_ids.shape:
        raise UsageError(
            f"rewards and turn_ids must be [b, t], got {list(rewards.shape)} and "
            f"{list(turn_ids.shape)}"
        )
    sizes = torch.as_tensor(group_sizes, dtype=torch.long)
    if sizes.dim() != 1 or int(sizes.sum()) != len(rewards):
        raise UsageError(f"groups of {list(group_sizes)} are no batch of {len(rewards)}")
    # A turn's reward is at its last token, so all tokens of a turn have the same return.
    returns = rewards.double().flip(-1).cumsum(-1).flip(-1)
    group = torch.repeat_interleave(sizes).to(rewards.device)
    advantages = torch.zeros_like(returns, dtype=torch.float32)
    for turn in range(int(turn_ids.max()) + 1 if turn_ids.numel() else 0):
        tokens = turn_ids == turn
        there = tokens.any(-1)
        members = group[there]
        count = torch.bincount(members, minlength=len(sizes)).clamp(min=1)

        def mean(values: Tensor, members: Tensor = members, count: Tensor = count) -> Tensor:
            """Of each one's group."""
            return (values.new_zeros(len(count)).index_add(0, members, values) / count)[members]

        values = returns[there].gather(1, tokens[there].int().argmax(-1, keepdim=True)).squeeze(1)
        # As in ``_centred``. Members are in order, so this finds the first one of each one's group.
        first = torch.searchsorted(members, members)
        differ = mean((values != values[first]).double()) > 0
        centred = (values - mean(values)).masked_fill(~differ, 0.0)
        if normalize:
            centred = centred / (mean(centred.square()).sqrt() + epsilon)
        advantages[there] += tokens[there] * centred[:, None].float()
    return advantages


def leave_one_out(rewards: Any) -> Tensor:
    """Each reward less the mean of the *others* of its group, a baseline that does not depend on
    the sample itself: RLOO, arXiv:2402.14740.

    Args, returns: as ``group_advantages``. Raises ``UsageError`` for groups of one as well.
    """
    values = _groups(rewards, 2)
    n = values.shape[-1]
    return (_centred(values) * (n / (n - 1))).float()


def has_signal(group: HasRewards) -> bool:
    """Whether the rewards of a group differ. If not, its advantages are 0, and a batch does better
    with another group in its place: DAPO's dynamic sampling, arXiv:2503.14476, section 3.2.

    For ``sglrl.rollout(keep=has_signal)``.
    """
    rewards = getattr(group, "rewards", None)
    if rewards is None:
        raise UsageError(f"has_signal takes a group, with its rewards, not {type(group).__name__}")
    return len(rewards) > 0 and bool((rewards != rewards[0]).any())


def _groups(rewards: Any, least: int) -> Tensor:
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if values.dim() not in (1, 2) or values.shape[-1] < least:
        raise UsageError(
            f"rewards must be [n] or [groups, n] with n of at least {least}, got "
            f"{list(values.shape)}"
        )
    return values


def _centred(values: Tensor) -> Tensor:
    """Less the mean; 0 where all are equal, which the mean's rounding is not."""
    equal = (values == values[..., :1]).all(-1, keepdim=True)
    return (values - values.mean(-1, keepdim=True)).masked_fill(equal, 0.0)
