"""End a request with an error if no token can be drawn for it. Other requests continue.

There are four causes. A logit processor may fail, or allow no token. A grammar may allow no token
after the accepted tokens, for example ``root ::= root "a"``. A grammar may allow only an end that
``min_new_tokens`` still forbids. The logits of a model that has diverged are NaN.

If a row has no drawable token, SGLang's greedy sampling returns token 0. SGLang's random sampling
fails an assertion of torch. This ends the process (on a GPU, its CUDA context), and with it all
other requests. A retry of the request would end the next worker.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglrl.errors import NOT_FINITE

from ..patch import Setup


def install(setup: Setup) -> None:
    """Patch SGLang's sampler. This patch must wrap all other patches of the sampler."""
    draw = Sampler._sample_from_probs

    def sample(self: Any, probs: torch.Tensor, info: Any, *args: Any, **kwargs: Any) -> Any:
        # The softmax of a row is NaN if a value is NaN or infinite, or if all values are -inf.
        rows = info.sglrl_undrawable = torch.isnan(probs[:, 0])
        if probs.is_cuda:
            # Do not test whether there is an undrawable row: the test would wait for the GPU.
            probs.masked_fill_(rows[:, None], 1 / probs.shape[1])
        elif rows.any():
            probs[rows] = 1 / probs.shape[1]
        return draw(self, probs, info, *args, **kwargs)

    forward = Sampler.forward

    def with_undrawable(self: Any, output: Any, info: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample, and set ``output.sglrl_undrawable``: bool [n].

        The rows are on the host as soon as the tokens of the step are.
        """
        info.sglrl_undrawable = None
        ids = forward(self, output, info, *args, **kwargs)
        rows = info.sglrl_undrawable
        if rows is None:
            # SGLang took the top token of each row. NaN ranks above all numbers, and -inf is taken
            # only if nothing else exists. Multiplied by 0, both become NaN.
            at = ids.long().unsqueeze(1)
            rows = torch.isnan(0 * output.next_token_logits.gather(1, at))[:, 0]
        output.sglrl_undrawable = to_host(rows)
        return ids

    Sampler._sample_from_probs = sample
    Sampler.forward = with_undrawable


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned memory. A copy to pageable memory would wait for the GPU."""
    if not values.is_cuda:
        return values
    target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return target.copy_(values, non_blocking=True)


def await_step(result: Any) -> None:
    """Wait until the GPU has finished a step and the copies of its results to the host."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    elif result.next_token_ids.is_cuda:
        torch.cuda.current_stream().synchronize()


def end_undrawable(batch: Any, result: Any, version: int) -> None:
    """Mark the requests that must end because of this step, before SGLang processes the step.

    Args:
        version: the version of the weights that this step used.
    """
    rows = getattr(getattr(result, "logits_output", None), "sglrl_undrawable", None)
    if rows is None:
        return
    await_step(result)
    if not rows.any():
        return
    for i in rows.nonzero()[:, 0].tolist():
        # The results may be padded.
        request = batch.reqs[i] if i < len(batch.reqs) else None
        if (
            request is None
            or request.finished()
            or request.to_finish is not None
            or request.is_retracted
            # The prefill of the prompt continues, so this token is not used.
            or request.inflight_middle_chunks > 0
        ):
            continue
        if error := getattr(request, "sglrl_processor_error", ""):
            request.to_finish = FINISH_ABORT(error, HTTPStatus.BAD_REQUEST)
        elif _allows_nothing(request):
            request.to_finish = FINISH_ABORT(
                f"no token is allowed after the {len(request.output_ids)} generated tokens: check "
                "the grammar, min_new_tokens and stop_token_ids",
                HTTPStatus.BAD_REQUEST,
            )
        elif request.custom_logit_processor is not None:
            request.to_finish = FINISH_ABORT(
                f"the logit processor {request.custom_logit_processor!r} allows no token after the "
                f"{len(request.output_ids)} generated tokens, or a logit is NaN or infinite",
                HTTPStatus.BAD_REQUEST,
            )
        else:
            request.to_finish = FINISH_ABORT(
                NOT_FINITE.format(version), HTTPStatus.INTERNAL_SERVER_ERROR
            )
        # The grammar must not see the placeholder token of this row.
        request.grammar = None


def _allows_nothing(request: Any) -> bool:
    """Return whether the request's own parameters forbid every token."""
    allowed = np.ones(request.vocab_size, bool)
    grammar, params, tokenizer = request.grammar, request.sampling_params, request.tokenizer
    if grammar is not None and not grammar.is_terminated():
        mask = grammar.allocate_vocab_mask(request.vocab_size, 1, "cpu")
        grammar.fill_vocab_mask(mask, 0)
        # A mask of type int32 has one bit per token. Masks of outlines have another format.
        if mask.dtype == torch.int32:
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed &= bits[: len(allowed)].view(bool)
    if len(request.output_ids) < params.min_new_tokens:
        stops = {*(params.stop_token_ids or ()), *(request.eos_token_ids or ())}
        if tokenizer is not None:
            stops |= {tokenizer.eos_token_id, *(tokenizer.additional_stop_token_ids or ())}
        allowed[[stop for stop in stops if stop is not None and stop < len(allowed)]] = False
    return not allowed.any()
