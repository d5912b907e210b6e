"""Are the trajectories exact? Every sampled token through transformers, with the weights of its own
policy version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..check.logprobs import LogprobCheck
from ..rollout import Trajectory


def replay(
    model: Any,
    versions: Mapping[int, Mapping[str, Any]],
    trajectories: Sequence[Trajectory],
    tolerance: float,
) -> LogprobCheck:
    """Compare the logprobs of sampled tokens with those that ``model`` gives to the trajectory's
    own prompt and response, once for every version that sampled some of it. Ends with ``model``
    holding other weights.

    That is what the engine computed if no KV cache outlives its version: updates with
    ``inflight="retract"``, sampling at temperature 1.
    """
    import torch

    from ..rl import token_logprobs

    largest, total, tokens, worst = 0.0, 0.0, 0, "nothing was compared"
    for version in sorted({v for t in trajectories for v in t.versions[t.loss_mask].tolist()}):
        model.load_state_dict(versions[version])
        # Those of one length at a time, so that there is no padding.
        rows: dict[int, list[int]] = {}
        for number, trajectory in enumerate(trajectories):
            if (trajectory.versions == version).any():
                rows.setdefault(len(trajectory.input_ids), []).append(number)
        for numbers in rows.values():
            ids = torch.tensor(np.array([trajectories[n].input_ids for n in numbers])).long()
            with torch.inference_mode():
                logits = model(input_ids=ids, use_cache=False).logits
                found = token_logprobs(logits, ids).numpy()
            for number, logprobs in zip(numbers, found, strict=True):
                trajectory = trajectories[number]
                own = trajectory.versions == version
                expected = logprobs[len(trajectory.prompt_ids) :]
                difference = np.abs(trajectory.logprobs - expected)
                difference = np.where(own, np.nan_to_num(difference, nan=np.inf), 0.0)
                position = int(difference.argmax())
                if not tokens or difference[position] > largest:
                    largest = float(difference[position])
                    worst = (
                        f"trajectory {number}, response token {position}, version {version}: "
                        f"{trajectory.logprobs[position]:.6f} here, {expected[position]:.6f} in "
                        "transformers"
                    )
                total += float(difference.sum())
                tokens += int(own.sum())
    return LogprobCheck(
        tokens=tokens,
        largest_difference=largest,
        mean_difference=total / max(1, tokens),
        tolerance=tolerance,
        worst=worst,
    )
