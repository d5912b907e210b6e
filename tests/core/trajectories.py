"""Arbitrary trajectories for Hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from sglrl.sessions.rewards import Reward
from sglrl.sessions.trajectory import Trajectory
from sglrl.sessions.turn import TrajectoryTiming, Turn

token = st.integers(0, 2**31 - 1)
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e9)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
    # msgpack text is UTF-8, which has no lone surrogates.
    | st.text(st.characters(codec="utf-8"), max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
    max_leaves=5,
)  # fmt: skip
rewards = st.builds(
    Reward,
    name=st.text("ab", min_size=1, max_size=2),
    value=float32,
    weight=float32,
    call=st.sampled_from(["", "call_0_1"]),
    whole=st.booleans(),
)
turn_values = st.fixed_dictionaries(
    {
        "reward": float32,
        "finish_reason": st.sampled_from(["stop", "length", "abort"]),
        "worker": st.integers(-1, 7),
        "cached_tokens": st.integers(0, 99),
        "prompt_tokens": st.integers(0, 99),
        "resumed": st.integers(0, 3),
        "seconds": seconds,
        "seconds_before": seconds,
        "rewards": st.lists(rewards, max_size=2).map(tuple),
    }
)


@st.composite
def trajectories(draw: st.DrawFn, metadata: Any = plain) -> Trajectory:
    """Draw trajectories with or without observations, with empty turns and with masked tokens."""
    prompt = draw(st.lists(token, min_size=1, max_size=5))
    response: list[int] = []
    mask: list[bool] = []
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 4))):
        observed = draw(st.lists(token, max_size=3))
        sampled = draw(st.lists(st.tuples(token, st.booleans()), max_size=4))
        start = len(response) + len(observed)
        response += [*observed, *(id for id, _ in sampled)]
        mask += [False] * len(observed) + [kept for _, kept in sampled]
        turns.append(Turn(start=start, stop=len(response), **draw(turn_values)))
    observed = draw(st.lists(token, max_size=3))
    response += observed
    mask += [False] * len(observed)
    return Trajectory(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        loss_mask=np.array(mask, np.bool_),
        logprobs=np.array(
            [draw(st.floats(-50, 0, width=32)) if kept else 0 for kept in mask], np.float32
        ),
        versions=np.array([draw(st.integers(0, 5)) if kept else -1 for kept in mask], np.int32),
        turns=tuple(turns),
        timing=TrajectoryTiming(*draw(st.tuples(seconds, seconds, seconds))),
        metadata=draw(st.dictionaries(st.text("abc", max_size=3), metadata, max_size=3)),
    )
