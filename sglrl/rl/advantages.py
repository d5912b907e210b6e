"""How much better a sample was than the others of its prompt."""

from __future__ import annotations

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
    values = _groups(rewards, 1)
    centred = values - values.mean(-1, keepdim=True)
    if not normalize:
        return centred
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + epsilon)


def leave_one_out(rewards: Any) -> Tensor:
    """Each reward less the mean of the *others* of its group, a baseline that does not depend on
    the sample itself: RLOO, arXiv:2402.14740.

    Args, returns: as ``group_advantages``. Raises ``UsageError`` for groups of one as well.
    """
    values = _groups(rewards, 2)
    n = values.shape[-1]
    return (values - values.mean(-1, keepdim=True)) * (n / (n - 1))


def has_signal(group: HasRewards) -> bool:
    """Whether the rewards of a group differ. If not, its advantages are 0, and a batch does better
    with another group in its place: DAPO's dynamic sampling, arXiv:2503.14476, section 3.2.

    For ``sglrl.rollout(keep=has_signal)``.
    """
    rewards = group.rewards
    return len(rewards) > 0 and bool((rewards != rewards[0]).any())


def _groups(rewards: Any, least: int) -> Tensor:
    values = torch.as_tensor(rewards, dtype=torch.float32)
    if values.dim() not in (1, 2) or values.shape[-1] < least:
        raise UsageError(
            f"rewards must be [n] or [groups, n] with n of at least {least}, got "
            f"{list(values.shape)}"
        )
    return values
