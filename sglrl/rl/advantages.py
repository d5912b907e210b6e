"""Compute advantages, which measure how much better a sample is than others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import UsageError


class HasRewards(Protocol):
    """An object with rewards, such as a ``Group``."""

    @property
    def rewards(self) -> Any: ...


def group_advantages(rewards: Any, *, normalize: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Return (reward - group mean) / group standard deviation for each reward.

    This is the advantage of GRPO, section 4.1.2 of arXiv:2402.03300.

    Args:
        rewards: the rewards of one group, [n], or of g groups, [g, n], as a tensor, an array or a
            sequence.
        normalize: whether to divide by the standard deviation. The division gives more weight to
            groups whose rewards differ little. Dr. GRPO omits it (arXiv:2503.20783).
        epsilon: a number that is added to the standard deviation. The standard deviation divides by
            n, not by n - 1.

    Returns:
        float32, of the same shape. All 0 in a group whose rewards are equal.

    Raises:
        UsageError: the rewards have a wrong shape.
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
    """Return one advantage per turn, for conversations whose turns are rewarded separately.

    The return of a turn is the sum of its reward and the rewards of all later turns. The advantage
    of a turn is (return - mean) / standard deviation. The mean and the standard deviation are
    computed over the turns of the group with the same index. Rewards of earlier turns have no
    effect. arXiv:2505.11821 compares advantages per turn with one advantage for all turns. If all
    trajectories have a single turn, the result is the same as for ``group_advantages``.

    Args:
        rewards: float [b, t], in the layout of ``sglrl.rollouts.stack``, padded on either side. The
            trajectories of a group are adjacent. Each branch has its own row.
        turn_ids: int64 [b, t], the index of each token's turn, in the same layout.
        group_sizes: number of rows of each group. Without branches, this is
            ``len(group.trajectories)``.
        normalize, epsilon: as in ``group_advantages``.

    Returns:
        float32 [b, t]: the turn's advantage at each of its tokens, and 0 elsewhere. The advantage
        is 0 for a turn that only one trajectory of its group has reached.

    Raises:
        UsageError: shapes are wrong, or the sum of the group sizes is not the batch size.
    """
    if rewards.dim() != 2 or rewards.shape != turn_ids.shape:
        raise UsageError(
            f"rewards and turn_ids must be [b, t], got {list(rewards.shape)} and "
            f"{list(turn_ids.shape)}"
        )
    sizes = torch.as_tensor(group_sizes, dtype=torch.long)
    if sizes.dim() != 1 or int(sizes.sum()) != len(rewards):
        raise UsageError(f"groups of {list(group_sizes)} are not a batch of {len(rewards)}")
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
            """Return, for each member, the mean over its group."""
            return (values.new_zeros(len(count)).index_add(0, members, values) / count)[members]

        values = returns[there].gather(1, tokens[there].int().argmax(-1, keepdim=True)).squeeze(1)
        # Equal returns must give exactly 0, as in ``_centred``. Members are sorted by group, so
        # ``searchsorted`` finds the first member of each member's group.
        first = torch.searchsorted(members, members)
        differ = mean((values != values[first]).double()) > 0
        centred = (values - mean(values)).masked_fill(~differ, 0.0)
        if normalize:
            centred = centred / (mean(centred.square()).sqrt() + epsilon)
        advantages[there] += tokens[there] * centred[:, None].float()
    return advantages


def leave_one_out(rewards: Any) -> Tensor:
    """Return each reward minus the mean of the *other* rewards of its group.

    This is RLOO (arXiv:2402.14740), whose baseline does not depend on the sample itself.

    Args:
        rewards: as in ``group_advantages``.

    Returns:
        float32, of the same shape. All 0 in a group whose rewards are equal.

    Raises:
        UsageError: the rewards have a wrong shape, or a group has only one reward.
    """
    values = _groups(rewards, 2)
    n = values.shape[-1]
    return (_centred(values) * (n / (n - 1))).float()


def has_signal(group: HasRewards) -> bool:
    """Return whether the rewards of a group differ. Usage: ``sglrl.rollout(keep=has_signal)``.

    If all rewards are equal, all advantages are 0, and another group is more useful in the batch.
    This is the dynamic sampling of DAPO (arXiv:2503.14476, section 3.2).

    Raises:
        UsageError: the argument has no rewards.
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
    """Return the values minus their mean.

    If all values are equal, the result is exactly 0, without the rounding error of the mean.
    """
    equal = (values == values[..., :1]).all(-1, keepdim=True)
    return (values - values.mean(-1, keepdim=True)).masked_fill(equal, 0.0)
