"""Convert samples to TorchRL's containers, with one tensordict per sample.

The containers of a generated sample:
    tokens: prompt, response (including the token that ended it), full. int64.
    log_probs: response, full. float32. ``full`` is NaN over the prompt, whose log-probs are
        unknown; TorchRL's losses ignore values that are not finite.
    masks: all_attention_mask is True except for padding. all_assistant_mask is True over the
        response.
    text: prompt, response (without the stop token or text), full.
    history: prompt, response, full.
The containers of a scored sample have only ``full``. Its assistant mask comes from the chat
template or from the input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from torchrl.data.llm import History
from torchrl.modules.llm.policies.common import ChatHistory, LogProbs, Masks, Text, Tokens


class Keys(NamedTuple):
    """The key of each container, or None if the container is not made."""

    text: Any
    tokens: Any
    masks: Any
    log_probs: Any
    history: Any


class Sample(NamedTuple):
    """One prompt with one response, or one scored sequence.

    Attributes:
        ids: int64 [length], the tokens of the prompt or of the whole scored sequence.
        response: int64 [t], the tokens of the response. None for a scored sequence.
        log_probs: float32, the log-probs of the response or of the whole scored sequence.
        assistant_mask: bool [length], the assistant mask of a scored sequence.
        places: bool [width], the positions of ``ids`` in the padded input row.
        logits: float32 [length, vocabulary], the log-probs of all tokens at each position.
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
    samples: Sequence[Sample],
    keys: Keys,
    padded: bool,
    pad: int,
    device: Any,
    shape: Sequence[int],
) -> TensorDictBase:
    """Return a tensordict of this batch shape with one row per sample.

    If ``padded`` is True, all samples are padded to the same length.
    """
    left, right = _paddings(samples) if padded else (_as_is, _as_is)
    rows = []
    for i, sample in enumerate(samples):
        row = TensorDict(device=device)
        for key, value in _containers(i, sample, keys, padded, pad, left, right):
            row.set(key, value)
        rows.append(row)
    return _nest(rows, shape)


def _nest(rows: list[TensorDict], shape: Sequence[int]) -> TensorDictBase:
    """Return the rows as lazy stacks of the given batch shape."""
    if not shape:
        return rows[0]
    size = len(rows) // shape[0]
    parts = [_nest(rows[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]
    return LazyStackedTensorDict.lazy_stack(parts, 0)


_Place = Callable[[int, torch.Tensor, Any], torch.Tensor]


def _as_is(i: int, values: torch.Tensor, fill: Any) -> torch.Tensor:
    return values


def _paddings(samples: Sequence[Sample]) -> tuple[_Place, _Place]:
    """Return two functions that pad values of sample i: for its ``ids`` and for its response."""
    widths = {0 if s.places is None else len(s.places) for s in samples}
    places = [s.places for s in samples]
    if len(widths) > 1 or 0 in widths:
        longest = max(len(s.ids) for s in samples)
        places = [torch.arange(longest) >= longest - len(s.ids) for s in samples]
    most = max(0 if s.response is None else len(s.response) for s in samples)

    def left(i: int, values: torch.Tensor, fill: Any) -> torch.Tensor:
        mask = places[i]
        assert mask is not None
        padded_values = values.new_full((len(mask), *values.shape[1:]), fill)
        padded_values[mask] = values
        return padded_values

    def right(i: int, values: torch.Tensor, fill: Any) -> torch.Tensor:
        padded_values = values.new_full((most,), fill)
        padded_values[: len(values)] = values
        return padded_values

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
    containers = [(keys.tokens, tokens), (keys.masks, masks)]
    if keys.log_probs is not None:
        containers.append((keys.log_probs, log_probs))
    if keys.text is not None:
        containers.append((keys.text, _text(sample)))
    if keys.history is not None:
        containers.append((keys.history, _history(sample)))
    if sample.logits is not None:
        containers.append(("logits", left(i, sample.logits, 0.0)))
    return containers


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
