"""A request behind which no token can be drawn ends with an error that says why, and it alone.

A grammar may allow nothing behind what it has accepted (``root ::= root "a"``), or nothing but an
end for which ``min_new_tokens`` is too early; and the logits of a model that has diverged are NaN.
Of such a row SGLang's greedy sampling makes token 0, and torch's assertion in its other sampling
ends the process (on a GPU its CUDA context), and with it the requests of everybody else. Sent
again, the request would end the next worker.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglrl.errors import NOT_FINITE


def install() -> None:
    """Call in the worker before the scheduler is built, behind others who put something in the
    place of SGLang's samplers."""
    draw = Sampler._sample_from_probs

    def sample(self: Any, probs: torch.Tensor, info: Any, *args: Any, **kwargs: Any) -> Any:
        # The softmax of a row in which one value is NaN or infinite, or all are -inf.
        rows = info.sglrl_undrawable = torch.isnan(probs[:, 0])
        if probs.is_cuda:
            # Whether there is one is not known here, without waiting for the GPU.
            probs.masked_fill_(rows[:, None], 1 / probs.shape[1])
        elif rows.any():
            probs[rows] = 1 / probs.shape[1]
        return draw(self, probs, info, *args, **kwargs)

    forward = Sampler.forward

    def with_undrawable(self: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
        """``output.sglrl_undrawable``: bool [n], on the host once the step's tokens are."""
        info.sglrl_undrawable = None
        ids = forward(self, output, info, *args, **kwargs)
        rows = info.sglrl_undrawable
        if rows is None:
            # The likeliest were taken: NaN before all others, and -inf if there is nothing else,
            # which makes NaN of 0.
            at = ids.long().unsqueeze(1)
            rows = torch.isnan(0 * output.next_token_logits.gather(1, at))[:, 0]
        output.sglrl_undrawable = _to_host(rows) if rows.is_cuda else rows
        return ids

    Sampler._sample_from_probs = sample
    Sampler.forward = with_undrawable


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    """On its way: into pageable memory the copy would wait for the GPU."""
    target = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return target.copy_(rows, non_blocking=True)


def end_undrawable(batch: Any, result: Any, version: int) -> None:
    """Before SGLang processes a step: mark the requests that must end here. ``version``: of the
    weights that made it."""
    rows = getattr(getattr(result, "logits_output", None), "sglrl_undrawable", None)
    if rows is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif result.next_token_ids.is_cuda:
        torch.cuda.current_stream().synchronize()
    if not rows.any():
        return
    for i in rows.nonzero()[:, 0].tolist():
        # What was computed may be padded.
        request = batch.reqs[i] if i < len(batch.reqs) else None
        if (
            request is None
            or request.finished()
            or request.to_finish is not None
            or request.is_retracted
            # Its prompt goes on.
            or request.inflight_middle_chunks > 0
        ):
            continue
        if _allows_nothing(request):
            request.to_finish = FINISH_ABORT(
                f"nothing is allowed behind the {len(request.output_ids)} tokens that were "
                "generated: see the grammar, min_new_tokens and stop_token_ids",
                HTTPStatus.BAD_REQUEST,
            )
        else:
            request.to_finish = FINISH_ABORT(
                NOT_FINITE.format(version), HTTPStatus.INTERNAL_SERVER_ERROR
            )
        # It must not be asked whether it accepts what stands for a token here.
        request.grammar = None


def _allows_nothing(request: Any) -> bool:
    """Whether the request itself forbids every token."""
    allowed = np.ones(request.vocab_size, bool)
    grammar, params, tokenizer = request.grammar, request.sampling_params, request.tokenizer
    if grammar is not None and not grammar.is_terminated():
        mask = grammar.allocate_vocab_mask(request.vocab_size, 1, "cpu")
        grammar.fill_vocab_mask(mask, 0)
        # A bit for each token. That of outlines is not like that.
        if mask.dtype == torch.int32:
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed &= bits[: len(allowed)].view(bool)
    if len(request.output_ids) < params.min_new_tokens:
        stops = {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
        if tokenizer is not None:
            stops |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
        allowed[[stop for stop in stops if stop is not None and stop < len(allowed)]] = False
    return not allowed.any()
