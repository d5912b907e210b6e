"""Keep the penalties of requests that are prefilled again, and count each token once.

SGLang forgets the penalties of a retracted request, because its penalizers start anew with each
prefill. The same happens to a request that continues the output of another worker. This module
restores the penalties of both. SGLang also applies the penalties of one request in an order that
differs between processes. This module fixes the order: see ``docs/logprobs.md``.

With overlap, SGLang (0.5.17 to 0.5.23) has a second fault. In each decode step it passes only the
last token of a request to the penalizers, no matter how many tokens have arrived since the previous
decode step. If a prefill ran between two decode steps, SGLang omits one token and counts the next
token twice. A request's first decode step counts the last token of the prompt. This module passes
each token once, when the token exists.

Before ``min_new_tokens``, SGLang forbids only the end token of the tokenizer. The configuration of
the model may contain more end tokens (``eos_token_id``). This module forbids all of them.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
)
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from ..patch import Setup


def install(setup: Setup) -> None:
    """Patch SGLang's penalties."""
    before = SamplingBatchInfo.from_schedule_batch.__func__

    def with_penalties(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = before(cls, batch, vocab_size)
        orchestrator = info.penalizer_orchestrator
        if orchestrator.is_required:
            # SGLang's order is the order of a set, which differs between processes. Apply the
            # additive penalties first, as the overlapping loop always does.
            order = sorted(orchestrator.penalizers.items(), key=lambda p: p[1].is_multiplicative)
            orchestrator.penalizers = dict(order)
            for penalizer in orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    restore(penalizer, [seen(request) for request in batch.reqs])
                    if isinstance(penalizer, BatchedMinNewTokensPenalizer):
                        _forbid_ends(penalizer, batch.reqs)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_penalties)
    ScheduleBatch.cumulate_penalty_output_tokens = _cumulate


def _forbid_ends(penalizer: Any, requests: list[Any]) -> None:
    """Forbid all end tokens of the model for requests with ``min_new_tokens``."""
    size = penalizer.stop_token_penalties.shape[1]
    for row, request in enumerate(requests):
        if request.sampling_params.min_new_tokens > 0:
            ends = [token for token in request.eos_token_ids or () if 0 <= token < size]
            penalizer.stop_token_penalties[row, ends] = float("-inf")


_of_last_tokens = ScheduleBatch.cumulate_penalty_output_tokens


@wraps(_of_last_tokens)
def _cumulate(self: Any) -> None:
    """Update the penalties of a batch that is about to decode."""
    if not self.enable_overlap:
        _of_last_tokens(self)
        return
    new = [len(request.output_ids) - getattr(request, "sglrl_told", 0) for request in self.reqs]
    if all(count == 1 for count in new):
        for request in self.reqs:
            request.sglrl_told = len(request.output_ids)
        _of_last_tokens(self)
        return
    rows = [
        list(request.output_ids[len(request.output_ids) - count :])
        for request, count in zip(self.reqs, new, strict=True)
    ]
    for request in self.reqs:
        request.sglrl_told = len(request.output_ids)
    for penalizer in self.sampling_info.penalizer_orchestrator.penalizers.values():
        if not penalizer.is_prepared():
            continue
        if isinstance(penalizer, BatchedMinNewTokensPenalizer):
            # This penalizer counts steps, including the current one, which has no token yet.
            penalizer.len_output_tokens += 1
        else:
            restore(penalizer, rows)


def seen(request: Any) -> list[int]:
    """Return all output tokens of a prefilled request, for penalizers that start anew."""
    request.sglrl_told = len(request.output_ids)
    return list(request.output_ids)


def restore(penalizer: Any, outputs: list[list[int]]) -> None:
    """Add outputs to the state of a penalizer, as if it had processed these tokens.

    Args:
        outputs: the output tokens to add to each row.
    """
    for row, output in enumerate(outputs):
        if not output:
            continue
        if isinstance(penalizer, BatchedMinNewTokensPenalizer):
            penalizer.len_output_tokens[row] += len(output)
            continue
        ids = torch.tensor(output, dtype=torch.int64)
        if isinstance(penalizer, BatchedFrequencyPenalizer):
            rows, penalties = penalizer.cumulated_frequency_penalties, penalizer.frequency_penalties
            ids = ids.to(rows.device)
            rows[row].index_add_(0, ids, penalties[row].expand(len(ids)))
        elif isinstance(penalizer, BatchedPresencePenalizer):
            rows, penalties = penalizer.cumulated_presence_penalties, penalizer.presence_penalties
            rows[row, ids.unique().to(rows.device)] = penalties[row]
        elif isinstance(penalizer, BatchedRepetitionPenalizer):
            rows = penalizer.cumulated_repetition_penalties
            penalties = penalizer.repetition_penalties
            rows[row, ids.unique().to(rows.device)] = penalties[row]
