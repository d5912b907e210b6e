"""The rewards that a session records for turns, for tool calls and for its whole trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isawaitable
from typing import Any, Final, SupportsFloat, TypeAlias

import msgspec
import numpy as np

from ..config import type_of
from ..errors import UsageError

MAX_REWARD: Final = float(np.finfo(np.float32).max)
RewardValue: TypeAlias = SupportsFloat | Mapping[str, SupportsFloat]
"""One reward, or a mapping from names to rewards."""


class Reward(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One named reward.

    Attributes:
        name: the name of the reward, for example "format".
        value: the reward without its weight.
        weight: the weight of the reward. ``Turn.reward`` contains ``weight * value``.
        call: the id of the tool call that is rewarded, or "" if the reward is not for a call.
        whole: whether the reward is for the whole trajectory, not only for its last turn.
    """

    name: str
    value: float
    weight: float = 1.0
    call: str = ""
    whole: bool = False


class Rewards:
    """The rewards of each turn of a session.

    Args:
        weights: the weights of rewards by name. Rewards with other names have the weight 1.

    Attributes:
        totals: for each turn, the weighted sum of its rewards.
        named: for each turn, its named rewards.
        given: whether any reward was added. A reward of 0 counts too.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.totals: list[float] = []
        self.named: list[tuple[Reward, ...]] = []
        self.given = False

    def add_turn(self) -> None:
        self.totals.append(0.0)
        self.named.append(())

    def add(
        self,
        turn: int,
        value: RewardValue,
        name: str,
        call: str,
        whole: bool,
        weight: SupportsFloat | None = None,
    ) -> None:
        """Add one reward, or several named rewards, to a turn. If one is wrong, add none.

        True and False are the rewards 1 and 0.

        Args:
            weight: the weight of the rewards. None: their weights by name.

        Raises:
            UsageError: a value is not a number, or a sum is not finite in float32.
        """
        total = self.totals[turn]
        own = None if weight is None else number("a weight", weight)
        if isinstance(value, Mapping):
            if name:
                raise UsageError("a dict of rewards has its own names: omit name")
            given = dict(value)
        else:
            given = {name: value}
        named: list[Reward] = []
        for key, one in given.items():
            if not isinstance(key, str):
                raise UsageError(f"the name of a reward must be a text, got {key!r:.200}")
            amount = number("a reward", float(one) if isinstance(one, (bool, np.bool_)) else one)
            factor = own
            if factor is None:
                factor = self._weights.get(key, 1.0) if key else 1.0
            total += factor * amount
            if not abs(total) <= MAX_REWARD:
                raise UsageError(f"a reward must be finite, also in float32; got {one}")
            if key:
                named.append(Reward(key, amount, factor, call, whole))
        self.totals[turn] = total
        self.named[turn] += tuple(named)
        self.given = True


def checked_weights(weights: Mapping[str, SupportsFloat] | None) -> dict[str, float]:
    """Return the weights of rewards as floats.

    Raises:
        UsageError: the argument is not a dict of names and finite numbers.
    """
    if weights is None:
        return {}
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise UsageError(f"reward_weights must be a dict of name and weight, got {weights!r:.200}")
    return {name: number(f"the weight of {name!r}", weight) for name, weight in weights.items()}


def number(name: str, value: Any) -> float:
    """Return the value as a float.

    Raises:
        UsageError: the value is not a number, or not finite in float32, the dtype of batches.
    """
    if isinstance(value, (bool, np.bool_, str, bytes)) or not hasattr(value, "__float__"):
        got = type_of(value) if isawaitable(value) else repr(value)
        raise UsageError(f"{name} must be a number, got {got}")
    try:
        amount = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(f"{name} must be a number, got {value!r}") from None
    if not abs(amount) <= MAX_REWARD:
        raise UsageError(f"{name} must be finite, also in float32; got {amount}")
    return amount
