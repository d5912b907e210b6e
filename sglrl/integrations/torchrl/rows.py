"""From samples to TorchRL's containers, one tensordict a sample.

Of a sample that was generated:
    tokens: prompt, response (what ended it included), full. int64.
    log_probs: response, and full, which is NaN over the prompt: those are not known, and TorchRL's
        losses leave out what is not finite. float32.
    masks: all_attention_mask: True but for padding. all_assistant_mask: True over the response.
    text: prompt, response without what ended it, full. history: prompt, response, full.
Of one that was scored: ``full`` alone, and the assistant mask of the chat template or the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import MetaData, TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies.common import ChatHistory, LogProbs, Masks, Text, Tokens


class Keys(NamedTuple):
    """Where each container goes; None: it is not wanted."""

    text: Any
    tokens: Any
    masks: Any
    log_probs: Any
    history: Any


class Sample(NamedTuple):
    """One prompt with one response, or one sequence that is scored.

    ids: int64 [length], of the prompt or of the whole sequence. response: int64 [t], None if it was
    scored. log_probs: float32, of the response, or of the whole sequence. assistant_mask: bool
    [length], of a sequence that is scored. places: bool [width], where ``ids`` are in the padded
    row that was given. logits: float32 [length, vocabulary].
    """

    ids: torch.Tensor
    response: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    text: str | None = None
    response_text: str | None = None
    history: Any = None
    is_complete: bool = True
    assistant_mask: torch.Tensor | None = None
    places: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def make_rows(
    samples: Sequence[Sample], keys: Keys, padded: bool, pad: int, device: Any
) -> list[TensorDict]:
    """One tensordict without batch dimensions a sample; with ``padded``, all of one length."""
    left, right = _paddings(samples) if padded else (_as_is, _as_is)
    rows = []
    for i, sample in enumerate(samples):
        row = TensorDict(device=device)
        for key, value in _containers(i, sample, keys, padded, pad, left, right):
            row.set(key, value)
        rows.append(row)
    return rows


_Place = Callable[[int, torch.Tensor, Any], torch.Tensor]


def _as_is(i: int, values: torch.Tensor, fill: Any) -> torch.Tensor:
    return values


def _paddings(samples: Sequence[Sample]) -> tuple[_Place, _Place]:
    """How the values of sample i's ``ids`` are padded, and those of its response."""
    widths = {0 if s.places is None else len(s.places) for s in samples}
    places = [s.places for s in samples]
    if len(widths) > 1 or 0 in widths:
        longest = max(len(s.ids) for s in samples)
        places = [torch.arange(longest) >= longest - len(s.ids) for s in samples]
    most = max(0 if s.response is None else len(s.response) for s in samples)

    def left(i: int, values: torch.Tensor, fill: Any) -> torch.Tensor:
        mask = places[i]
        assert mask is not None
        found = values.new_full((len(mask), *values.shape[1:]), fill)
        found[mask] = values
        return found

    def right(i: int, values: torch.Tensor, fill: Any) -> torch.Tensor:
        found = values.new_full((most,), fill)
        found[: len(values)] = values
        return found

    return left, right


def _containers(
    i: int, sample: Sample, keys: Keys, padded: bool, pad: int, left: _Place, right: _Place
) -> list[tuple[Any, Any]]:
    flag = MetaData(padded)
    ids = left(i, sample.ids, pad)
    attention = left(i, torch.ones_like(sample.ids, dtype=torch.bool), False)
    response, logprobs = sample.response, sample.log_probs
    if response is None:
        tokens = Tokens(full=ids, padded=flag)
        theirs = sample.assistant_mask
        assistant = None if theirs is None else left(i, theirs, False)
        log_probs = None
        if logprobs is not None:
            log_probs = LogProbs(full=left(i, logprobs, 0.0), padded=flag)
    else:
        answered = right(i, torch.ones_like(response, dtype=torch.bool), False)
        response = right(i, response, pad)
        tokens = Tokens(prompt=ids, response=response, full=torch.cat([ids, response]), padded=flag)
        assistant = torch.cat([torch.zeros_like(attention), answered])
        attention = torch.cat([attention, answered])
        log_probs = None
        if logprobs is not None:
            logprobs = right(i, logprobs, 0.0)
            unknown = logprobs.new_full((len(ids),), torch.nan)
            log_probs = LogProbs(
                response=logprobs, full=torch.cat([unknown, logprobs]), padded=flag
            )
    masks = Masks(all_attention_mask=attention, all_assistant_mask=assistant, padded=flag)
    found = [(keys.tokens, tokens), (keys.masks, masks)]
    if keys.log_probs is not None:
        found.append((keys.log_probs, log_probs))
    if keys.text is not None:
        found.append((keys.text, _text(sample)))
    if keys.history is not None:
        found.append((keys.history, _history(sample)))
    if sample.logits is not None:
        found.append(("logits", left(i, sample.logits, 0.0)))
    return found


def _text(sample: Sample) -> Text:
    if sample.response_text is None or sample.text is None:
        return Text(full=sample.text)
    return Text(
        prompt=sample.text,
        response=sample.response_text,
        full=sample.text + sample.response_text,
    )


def _history(sample: Sample) -> ChatHistory:
    if sample.response is None:
        return ChatHistory(full=sample.history)
    answer = History(
        role="assistant",
        content=sample.response_text,
        is_complete=sample.is_complete,
        device=sample.history.device,
    )
    response = lazy_stack([answer])
    full = lazy_stack([*sample.history.unbind(0), answer])
    return ChatHistory(prompt=sample.history, response=response, full=full)
