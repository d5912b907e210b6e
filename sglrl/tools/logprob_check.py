"""Compare the logprob of every sampled token with Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..inference.completion import Completion

TOKENS_PER_BATCH = 4096
"""Maximum number of input tokens in a batch, with padding. This limits the memory for logits."""

TOLERANCES = {"float32": 1e-4}
ROUNDED_TOLERANCE = 3e-2
"""Tolerance for 16-bit models. Results of two correct orders of summation differ by up to this."""


class LogprobCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check. All differences are absolute values, and logarithms are natural.

    Attributes:
        tokens: number of compared tokens.
        largest_difference: largest difference of a compared token. NaN counts as infinite.
        mean_difference: mean difference of all compared tokens. NaN counts as infinite.
        tolerance: largest allowed value of ``largest_difference``.
        worst: a readable description of the token with the largest difference.
    """

    tokens: int
    largest_difference: float
    mean_difference: float
    tolerance: float
    worst: str

    @property
    def passed(self) -> bool:
        return self.largest_difference <= self.tolerance


def tolerance_for(dtype: str) -> float:
    """Return the allowed difference between two correct implementations of a model in a dtype."""
    return TOLERANCES.get(dtype, ROUNDED_TOLERANCE)


def load_reference(model: str, device: str) -> Any:
    """Load the model with transformers in its saved dtype, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device).eval()


def reference_logprobs(
    reference: Any, completions: Sequence[Completion]
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Compute the logprobs of every completion with ``reference``. Yield ``(index, logprobs)``.

    ``logprobs`` is float32 [t], one value per output token. The longest completions come first, so
    that batches need little padding.
    """
    import torch

    order = sorted(range(len(completions)), key=lambda i: -_length(completions[i]))
    at = 0
    while at < len(order):
        # The first completion is the longest of its batch.
        longest = _length(completions[order[at]])
        batch = order[at : at + max(1, TOKENS_PER_BATCH // longest)]
        at += len(batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, index in enumerate(batch):
            completion = completions[index]
            tokens = np.concatenate([completion.prompt_ids, completion.output_ids])
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(reference.device), mask.to(reference.device)
        with torch.inference_mode():
            logits = reference(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, index in enumerate(batch):
                start = len(completions[index].prompt_ids)
                stop = _length(completions[index])
                # The logits at position i predict token i + 1.
                scores = torch.log_softmax(logits[row, start - 1 : stop - 1].float(), dim=-1)
                chosen = scores.gather(1, ids[row, start:stop, None])[:, 0]
                yield index, chosen.cpu().numpy()


def compare(
    reference: Any,
    completions: Sequence[Completion],
    tolerance: float,
    on_done: Callable[[], None] = lambda: None,
) -> LogprobCheck:
    """Compare the logprob of every output token with the logprob that ``reference`` computes.

    Args:
        reference: a model from ``load_reference``.
        completions: completions that were sampled at temperature 1, with logprobs.
        tolerance: the largest allowed difference of a logprob.
        on_done: a function that is called once per completion.

    Raises:
        ValueError: a completion does not have one logprob per output token.
    """
    largest, total, tokens, worst = 0.0, 0.0, 0, "nothing was compared"
    for index, expected in reference_logprobs(reference, completions):
        completion = completions[index]
        ours = completion.logprobs
        if ours is None or ours.shape != expected.shape:
            raise ValueError(f"{completion!r} does not have one logprob per output token")
        difference = np.nan_to_num(np.abs(ours - expected), nan=np.inf)
        position = int(difference.argmax())
        if not tokens or difference[position] > largest:
            largest = float(difference[position])
            worst = (
                f"request {index}, output token {position} "
                f"(id {completion.output_ids[position]}): {ours[position]:.6f} here, "
                f"{expected[position]:.6f} in transformers"
            )
        total += float(difference.sum())
        tokens += len(expected)
        on_done()
    return LogprobCheck(
        tokens=tokens,
        largest_difference=largest,
        mean_difference=total / tokens if tokens else 0.0,
        tolerance=tolerance,
        worst=worst,
    )


def _length(completion: Completion) -> int:
    return len(completion.prompt_ids) + len(completion.output_ids)
