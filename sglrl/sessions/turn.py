"""One turn of a trajectory, and the checks of its values."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .rewards import Reward, number


class Turn(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One generation in a trajectory.

    Attributes:
        start, stop: the turn's tokens are ``response_ids[start:stop]``. The range is empty if the
            turn was aborted before its first token.
        reward: the weighted sum of all rewards of this turn, with and without names.
        finish_reason: "stop", "length" or "abort", as in ``Completion``.
        worker: index of the worker that finished the turn, or -1 if no worker did.
        cached_tokens: tokens of the turn's prompt that came from the prefix cache.
        prompt_tokens: length of the turn's prompt: all tokens before ``start``.
        resumed: number of workers that were lost while they held the turn.
        seconds: seconds from submission to the end.
        seconds_before: seconds from the end of the previous turn to the submission of this one.
            Tools and the environment use this time. 0 for the first turn.
        rewards: the named rewards. ``reward`` includes them.
        lora: the name of the LoRA adapter that sampled the turn, or "" without an adapter.
        waiting: seconds of ``seconds`` before the turn was sent to a worker.
    """

    start: int
    stop: int
    reward: float = 0.0
    finish_reason: str = "stop"
    worker: int = -1
    cached_tokens: int = 0
    prompt_tokens: int = 0
    resumed: int = 0
    seconds: float = 0.0
    seconds_before: float = 0.0
    rewards: tuple[Reward, ...] = ()
    lora: str = ""
    waiting: float = 0.0


class TrajectoryTiming(NamedTuple):
    """The durations of a trajectory.

    Attributes:
        started: the time at which the session began, in seconds since the Unix epoch.
        total: seconds from ``started`` to the end.
        generating: seconds of ``total`` spent waiting for turns. The environment used the rest.
    """

    started: float = 0.0
    total: float = 0.0
    generating: float = 0.0


def checked_turns(given: Sequence[Any], sampled: NDArray[np.bool_]) -> tuple[Turn, ...]:
    """Return the turns of a response with all numeric fields as Python numbers.

    Args:
        sampled: bool [r], True where the policy sampled the token.

    Raises:
        UsageError: a field has a wrong type, the turns are not in order, or a sampled token is in
            none of them.
    """
    turns = tuple(_checked_turn(index, turn) for index, turn in enumerate(given))
    outside = sampled.copy()
    at = 0
    for index, turn in enumerate(turns):
        if not at <= turn.start <= turn.stop <= len(sampled):
            raise UsageError(
                f"turns[{index}] is {turn.start} to {turn.stop}, which is not within {at} to "
                f"{len(sampled)}: turns are in order, do not overlap and end in the response"
            )
        at = turn.stop
        outside[turn.start : turn.stop] = False
    if outside.any():
        raise UsageError(
            f"loss_mask is True at {int(outside.argmax())}, which is in none of the turns"
        )
    return turns


def _checked_turn(index: int, turn: Any) -> Turn:
    """Return the turn with all numeric fields as Python numbers.

    Raises:
        UsageError: a field has a wrong type.
    """
    where = f"turns[{index}]"
    if not isinstance(turn, Turn):
        raise UsageError(f"{where} is a {type(turn).__name__}, not a Turn")
    values: dict[str, Any] = {}
    for name in Turn.__struct_fields__:
        value = getattr(turn, name)
        if name in ("reward", "seconds", "seconds_before", "waiting"):
            values[name] = number(f"{where}.{name}", value)
        elif name in ("finish_reason", "lora"):
            if not isinstance(value, str):
                raise UsageError(f"{where}.{name} must be a text, got {value!r}")
            values[name] = value
        elif name == "rewards":
            values[name] = tuple(value)
            if not all(isinstance(reward, Reward) for reward in values[name]):
                raise UsageError(f"{where}.{name} must be rewards, got {value!r:.200}")
        else:
            try:
                values[name] = operator.index(value)
            except TypeError:
                raise UsageError(f"{where}.{name} must be an integer, got {value!r}") from None
            if isinstance(value, (bool, np.bool_)):
                raise UsageError(f"{where}.{name} must be an integer, got {value!r}")
    return Turn(**values)
