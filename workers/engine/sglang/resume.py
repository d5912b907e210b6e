"""A request that another worker has begun goes on here, as one that SGLang itself has retracted:
its tokens so far are output, not prompt, so every limit, stop string, penalty and grammar goes on
from where it was. Prefill covers prompt and output; nothing is sent twice.

SGLang forgets the penalties of a retracted request (its penalizers begin anew with each prefill);
here they are given back, to retracted requests too.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
)
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@dataclass(frozen=True)
class Resume:
    """Travels with its request through SGLang's own broadcast to all ranks. ``ids``: of output."""

    rid: str
    ids: array[int]


def begin(request: Any, ids: array[int]) -> None:
    """Make the request, fresh from SGLang's constructor, one that has already sent ``ids``."""
    count = len(ids)
    request.output_ids = array("q", ids)
    request.send_token_offset = count
    if request.return_logprob:
        logprob = request.logprob
        for name in (
            "output_token_logprobs",
            "output_top_logprobs",
            "output_token_ids_logprobs",
        ):
            # Places of what another worker has sent.
            getattr(logprob, f"{name}_val").extend([None] * count)
            getattr(logprob, f"{name}_idx").extend([None] * count)
        request.send_output_token_logprobs_offset = count


def enter(request: Any) -> None:
    """When SGLang is about to queue it: bring the grammar, if there is one, to where the output is,
    and ask for logprobs from there on."""
    if request.return_logprob:
        request.logprob_start_len = len(request.origin_input_ids) + len(request.output_ids)
    if request.grammar is not None:
        for token in request.output_ids:
            request.grammar.accept_token(token)


def install() -> None:
    """Call in the worker before the scheduler is built, and after what else changes batches."""
    before = SamplingBatchInfo.from_schedule_batch.__func__

    def with_penalties(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = before(cls, batch, vocab_size)
        orchestrator = info.penalizer_orchestrator
        if orchestrator.is_required:
            for penalizer in orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    restore(penalizer, [seen(request, batch) for request in batch.reqs])
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_penalties)


def seen(request: Any, batch: Any) -> list[int]:
    """The tokens that SGLang's penalizers would have been told of by now. With overlap it tells
    them of each one a step late, and first of the prompt's last."""
    output = list(request.output_ids)
    if not output or not batch.enable_overlap:
        return output
    return [request.origin_input_ids[-1], *output[:-1]]


def restore(penalizer: Any, outputs: list[list[int]]) -> None:
    """What the penalizer would have cumulated over these outputs, a row each."""
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
