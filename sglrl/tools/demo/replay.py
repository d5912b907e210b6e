"""Check logprobs with Hugging Face transformers.

The logprob of each token is computed again with the weights of the policy version that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...rollouts import Trajectory, Turn
from ..logprob_check import LogprobCheck


def replay(
    model: Any,
    versions: Mapping[int, Mapping[str, Any]],
    trajectories: Sequence[Trajectory],
    tolerance: float,
) -> LogprobCheck:
    """Compare the logprobs of sampled tokens with the logprobs that ``model`` computes.

    The logprob of each token is computed with the weights of its policy version.

    The tokens must be sampled at temperature 1, and updates must use ``inflight="continue"``. The
    KV cache entries of an older version then stay until the end of a turn. A new turn uses no
    entries of older versions.

    Args:
        model: a transformers model of the policy's architecture. This function changes its weights.
        versions: the weights of each policy version.
        trajectories: the trajectories whose tokens are compared.
        tolerance: the largest allowed difference of a logprob.
    """
    expected = [np.zeros(len(t.response_ids), np.float32) for t in trajectories]
    turns: dict[int, dict[int, list[tuple[int, Turn]]]] = {}
    for number, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            made_by = trajectory.versions[turn.start : turn.stop]
            if len(set(made_by.tolist())) > 1:
                expected[number][turn.start : turn.stop] = _mixed(model, versions, trajectory, turn)
            elif len(made_by):
                length = len(trajectory.prompt_ids) + turn.stop
                of_version = turns.setdefault(int(made_by[0]), {})
                of_version.setdefault(length, []).append((number, turn))
    for version, by_length in turns.items():
        model.load_state_dict(versions[version])
        # All inputs of a batch have the same length, so that there is no padding.
        for length, members in by_length.items():
            rows = _logprobs(model, [trajectories[n].input_ids[:length] for n, _ in members])
            for (number, turn), row in zip(members, rows, strict=True):
                expected[number][turn.start : turn.stop] = row[length - (turn.stop - turn.start) :]
    return _compare(trajectories, expected, tolerance)


def _logprobs(model: Any, ids: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    """Return float32 [b, t]: the logprob of each token given the tokens before it."""
    import torch

    from ...rl import token_logprobs

    tokens = torch.tensor(np.array(ids)).long()
    with torch.inference_mode():
        logprobs: NDArray[np.float32] = token_logprobs(
            model(input_ids=tokens, use_cache=False).logits, tokens
        ).numpy()
    return logprobs


def _mixed(
    model: Any, versions: Mapping[int, Mapping[str, Any]], trajectory: Trajectory, turn: Turn
) -> NDArray[np.float32]:
    """Return the logprobs of a turn that several versions sampled.

    The step that samples a token also computes the KV cache entries of earlier tokens that have
    none yet. The entry of a sampled token therefore comes from the version that sampled the next
    token.
    """
    import torch
    from transformers import DynamicCache

    start = len(trajectory.prompt_ids) + turn.start
    stop = len(trajectory.prompt_ids) + turn.stop
    made_by = trajectory.versions[turn.start : turn.stop]
    ids = torch.from_numpy(trajectory.input_ids.astype(np.int64))[None]
    cache, held, rows = DynamicCache(), 0, []
    ends = [*(np.flatnonzero(np.diff(made_by)) + 1 + start).tolist(), stop]
    for begin, end in pairwise([start, *ends]):
        model.load_state_dict(versions[int(made_by[begin - start])])
        with torch.inference_mode():
            logits = model(
                input_ids=ids[:, held : end - 1], past_key_values=cache, use_cache=True
            ).logits[0, begin - end :]
        held = end - 1
        rows.append(torch.log_softmax(logits.float(), dim=-1))
    logprobs: NDArray[np.float32] = (
        torch.cat(rows).gather(1, ids[0, start:stop, None]).squeeze(1).numpy()
    )
    return logprobs


def _compare(
    trajectories: Sequence[Trajectory], expected: Sequence[NDArray[np.float32]], tolerance: float
) -> LogprobCheck:
    largest, total, tokens, worst = 0.0, 0.0, 0, "nothing was compared"
    for number, (trajectory, wanted) in enumerate(zip(trajectories, expected, strict=True)):
        difference = np.abs(trajectory.logprobs - wanted)
        difference = np.where(trajectory.loss_mask, np.nan_to_num(difference, nan=np.inf), 0.0)
        position = int(difference.argmax())
        if not tokens or difference[position] > largest:
            largest = float(difference[position])
            worst = (
                f"trajectory {number}, response token {position}, version "
                f"{trajectory.versions[position]}: {trajectory.logprobs[position]:.6f} here, "
                f"{wanted[position]:.6f} in transformers"
            )
        total += float(difference.sum())
        tokens += int(trajectory.loss_mask.sum())
    return LogprobCheck(
        tokens=tokens,
        largest_difference=largest,
        mean_difference=total / max(1, tokens),
        tolerance=tolerance,
        worst=worst,
    )
