"""A request that another worker has begun goes on here, as one that SGLang itself has retracted:
its tokens so far are output, not prompt, so every limit, stop string, penalty and grammar goes on
from where it was. Prefill covers prompt and output; nothing is sent twice.

SGLang forgets the penalties of a retracted request (its penalizers begin anew with each prefill);
here they are given back, to retracted requests too. And with overlap SGLang (0.5.17 to 0.5.23)
tells its penalizers of a request's last token once a step, whatever has come since the step before:
a prefill in between has it leave one token out and count the next one twice, and the first step
counts the prompt's last token. Here they are told of each token once, when it is there.
"""

from __future__ import annotations

from array import array
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
    and ask for logprobs from there on. One whose output its grammar does not allow ends with an
    error, as one does whose grammar cannot be compiled."""
    if request.return_logprob:
        request.logprob_start_len = len(request.origin_input_ids) + len(request.output_ids)
    if request.grammar is not None:
        try:
            for token in request.output_ids:
                request.grammar.accept_token(token)
        except ValueError:
            request.set_finish_with_abort(
                f"the {len(request.output_ids)} tokens to go on from do not fit the grammar"
            )


def install() -> None:
    """Call in the worker before the scheduler is built, and after what else changes batches."""
    before = SamplingBatchInfo.from_schedule_batch.__func__

    def with_penalties(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = before(cls, batch, vocab_size)
        orchestrator = info.penalizer_orchestrator
        if orchestrator.is_required:
            for penalizer in orchestrator.penalizers.values():
                if penalizer.is_prepared():
                    restore(penalizer, [seen(request) for request in batch.reqs])
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_penalties)
    ScheduleBatch.cumulate_penalty_output_tokens = _cumulate


_of_last_tokens = ScheduleBatch.cumulate_penalty_output_tokens


@wraps(_of_last_tokens)
def _cumulate(self: Any) -> None:
    """Of a batch that is about to decode."""
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
            # Of steps, also of the one whose token is not there yet.
            penalizer.len_output_tokens += 1
        else:
            restore(penalizer, rows)


def seen(request: Any) -> list[int]:
    """Of a request that is prefilled: what penalizers that begin anew are told of."""
    request.sglrl_told = len(request.output_ids)
    return list(request.output_ids)


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
