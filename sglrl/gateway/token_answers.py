"""Parts of answers that are made of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..inference.completion import Completion
from .answers import token_counts


class TokenRow(NamedTuple):
    """A sampled token.

    Attributes:
        others: the likeliest tokens and their logprobs, most likely first.
    """

    id: int
    logprob: float
    others: list[tuple[int, float]]


def token_rows(completion: Completion, start: int = 0) -> Iterator[TokenRow]:
    """Yield the tokens of a completion from position ``start``."""
    assert completion.logprobs is not None
    ids, logprobs = completion.output_ids[start:].tolist(), completion.logprobs[start:].tolist()
    top = completion.top_logprobs
    if top is None:
        for id_, logprob in zip(ids, logprobs, strict=True):
            yield TokenRow(id_, logprob, [])
        return
    others = zip(top.ids[start:].tolist(), top.logprobs[start:].tolist(), strict=True)
    for id_, logprob, (top_ids, values) in zip(ids, logprobs, others, strict=True):
        yield TokenRow(id_, logprob, list(zip(top_ids, values, strict=True)))


def usage_of_prompts(completions: Sequence[Completion], choices: int) -> dict[str, Any]:
    """Return OpenAI's ``usage`` of several prompts.

    Args:
        choices: number of completions of each prompt.
    """
    prompt = sampled = cached = 0
    for first in range(0, len(completions), choices):
        counts = token_counts(completions[first : first + choices])
        prompt, sampled, cached = prompt + counts[0], sampled + counts[1], cached + counts[2]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
