"""Make the parts of answers that list or count tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ..inference.completion import Completion
from .answers import token_counts
from .dialect import Message

_BLOCK: Final = 64
"""Number of tokens that are decoded together."""
_FRAME: Final = 64
"""Maximum number of characters that a format writes before the reasoning."""


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
        completions: the completions of all prompts, in order.
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


def reasoning_tokens(completion: Completion, message: Message) -> int:
    """Return the number of tokens up to the end of the reasoning, or 0 without reasoning.

    Args:
        completion: the turn.
        message: the message of the turn, from ``message_of``.
    """
    return tokens_until(completion, (message.get("reasoning_content") or "").strip())


def tokens_until(completion: Completion, text: str) -> int:
    """Return the number of tokens of a turn up to the end of a text at its beginning.

    Only tokens at the beginning are decoded.

    Args:
        completion: the turn.
        text: the text. The format may add up to ``_FRAME`` characters before it.

    Returns:
        The number of tokens. 0 if the text is empty or the turn does not begin with it.
    """
    ids = completion.output_ids.tolist()
    before, start = "", 0
    while text and start < len(ids) and len(before) <= len(text) + _FRAME:
        stop = start + _BLOCK
        while (block := completion.decode(ids[start:stop], False)).endswith("\ufffd"):
            if stop >= len(ids):
                break
            stop += 1  # Include all tokens of the last character.
        if len(before) + len(block) >= len(text) and text in before + block:
            for end in range(start + 1, stop):
                if text in before + completion.decode(ids[start:end], False):
                    return end
            return stop
        before, start = before + block, stop
    return 0
