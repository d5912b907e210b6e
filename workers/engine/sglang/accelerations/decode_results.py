"""Process the results of a decode step with little work per request.

With a small model and a large batch, SGLang's scheduler spends most of its time on these results.
In a step of 1,024 requests almost every request gets one token and continues. SGLang makes a dozen
calls for each of them.

In this module, a request that only continues gets its token and its logprob, and nothing else.
SGLang's own code processes all other requests, as a smaller batch: requests that may end with the
new token, that report it, or that need more than the token and its logprob.

The fast path omits work of SGLang's methods. The work has no effect on a request that only
continues. ``patch_list`` names these methods, so their sources are checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.runtime_context import get_disagg

from .. import compat
from ..patch import Setup


class _Plan:
    """Values that decide whether a token ends the request, and whether to report the token.

    Attributes:
        limit: the maximum number of tokens of the request.
        stops: the tokens that end the request.
        logprob: whether the request needs the logprobs of its tokens.
        vocab_size: the exclusive upper bound of token ids.
        interval: the number of tokens in one report.
    """

    __slots__ = ("interval", "limit", "logprob", "stops", "vocab_size")

    def __init__(self, request: Any) -> None:
        params = request.sampling_params
        self.limit = params.max_new_tokens
        self.interval = params.stream_interval
        self.logprob = bool(request.return_logprob)
        self.vocab_size = request.vocab_size
        stops: set[int] = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops.update(request.eos_token_ids or ())
            if request.tokenizer is not None:
                stops.add(request.tokenizer.eos_token_id)
                stops.update(request.tokenizer.additional_stop_token_ids or ())
        self.stops = frozenset(stops)


def _plan(request: Any) -> _Plan | None:
    """Return the plan, or None if SGLang's own code must process the request in every step."""
    params = request.sampling_params
    logprob = request.logprob
    if (
        not request.stream
        or (params.stream_interval or 1) == 1
        or request.grammar is not None
        or params.stop_strs
        or params.stop_regex_strs
        or request.return_hidden_states
        or request.return_sampling_mask
        or request.require_reasoning
        or (
            request.return_logprob
            and (logprob.top_logprobs_num > 0 or logprob.token_ids_logprob is not None)
        )
        or getattr(request, "beam_group", None) is not None
        or request.vocab_size is None
        or request.time_stats.enable_metrics
        or request.time_stats.trace_ctx.tracing_enable
    ):
        return None
    return _Plan(request)


def install(setup: Setup) -> Callable[[Any], bool]:
    """Return a function that replaces the scheduler's processor of results by ``Results``."""
    return _replace


def _replace(scheduler: Any) -> bool:
    theirs = scheduler.batch_result_processor
    if (
        theirs.tree_cache.supports_mamba()
        or get_disagg().disaggregation_decode_enable_offload_kvcache
        or getattr(theirs.model_config, "self_opened_think_start_ids", None)
    ):
        return False
    scheduler.batch_result_processor = Results(**compat.field_values(theirs))
    return True


class Results(SchedulerBatchResultProcessor):  # type: ignore[misc]
    """SGLang's processor, with a fast path for requests that only continue in a decode step."""

    __slots__ = ()

    def process_batch_result_decode(self, batch: Any, result: Any) -> None:
        if self._takes(batch, result):
            if result.copy_done is not None:
                result.copy_done.synchronize()
            batch, result = self._go_on(batch, result)
        super().process_batch_result_decode(batch, result)

    def _takes(self, batch: Any, result: Any) -> bool:
        """Return whether the fast path applies to a step.

        It does not apply if the step has other results than tokens and logprobs. It also does not
        apply if SGLang logs this step, because the log entry describes the whole batch.
        """
        logits, metrics = result.logits_output, self.metrics_reporter
        return (
            batch.spec_algorithm.is_none()
            and result.routed_experts_output is None
            and result.indexer_topk_output is None
            and getattr(result, "auxiliary_host_output", None) is None
            and logits is not None
            and logits.hidden_states is None
            and logits.customized_info is None
            and logits.next_token_sampling_mask_idx is None
            and not metrics.current_scheduler_metrics_enabled
            and (metrics.forward_ct_decode + 1) % metrics.decode_log_interval != 0
        )

    def _go_on(self, batch: Any, result: Any) -> tuple[Any, Any]:
        """Add tokens to the requests that only continue. Return batch and result of the rest."""
        ids = result.next_token_ids
        ids = ids if isinstance(ids, list) else ids.tolist()
        logits = result.logits_output
        logprobs = logits.next_token_logprobs.tolist() if batch.return_logprob else ids
        others: list[int] = []
        requests = batch.reqs
        # The results may be padded. They are never fewer than the requests.
        rows = zip(requests, ids[: len(requests)], logprobs[: len(requests)], strict=True)
        for i, (request, token, value) in enumerate(rows):
            try:
                plan = request.sglrl_plan
            except AttributeError:
                plan = request.sglrl_plan = _plan(request)
            if (
                plan is None
                or request.finished_reason is not None
                or request.is_retracted
                or request.to_finish is not None
            ):
                others.append(i)
                continue
            output = request.output_ids
            count, sent, interval = len(output) + 1, request.send_token_offset, plan.interval
            # For the interval, some SGLang versions count all tokens, others the unsent tokens.
            if (
                count >= plan.limit
                or not sent
                or count - sent >= interval
                or count % interval == 1
                or token in plan.stops
                or not 0 <= token < plan.vocab_size
            ):
                others.append(i)
                continue
            output.append(token)
            if plan.logprob:
                logprob = request.logprob
                logprob.output_token_logprobs_val.append(value)
                logprob.output_token_logprobs_idx.append(token)
        self.metrics_reporter.num_generated_tokens += len(requests) - len(others)
        return _part(batch, result, ids, others)


def _part(batch: Any, result: Any, ids: list[int], rows: list[int]) -> tuple[Any, Any]:
    """Return the batch and the result of the requests in ``rows``."""
    part, outcome = copy.copy(batch), copy.copy(result)
    part.reqs = [batch.reqs[i] for i in rows]
    outcome.next_token_ids = [ids[i] for i in rows]
    outcome.copy_done = None
    if batch.return_logprob:
        logits = outcome.logits_output = copy.copy(result.logits_output)
        logits.next_token_logprobs = logits.next_token_logprobs[rows]
        for name in (
            "next_token_top_logprobs_val",
            "next_token_top_logprobs_idx",
            "next_token_token_ids_logprobs_val",
            "next_token_token_ids_logprobs_idx",
        ):
            values = getattr(logits, name)
            if values:
                setattr(logits, name, [values[i] for i in rows])
    return part, outcome
