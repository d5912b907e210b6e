"""Answer queries for the next token without SGLang's scheduling.

A client may request distributions one token after the other, as genlm's inference does. The prefix
cache then holds all tokens of a query except the last token. Such a query needs one row of a decode
step and one more token in the cache. But SGLang turns it into a request that is queued, admitted,
allocated, prefilled, sampled, finished and reported. This takes half a millisecond of SGLang's
thread.

This module runs the waiting queries as decode steps between two of SGLang's own steps. The steps
use SGLang's model runner, memory and prefix cache, and leave these as SGLang's own requests would.
A query with a few new tokens becomes one row for each new token (``short_prefill.py``).

SGLang runs all other queries. Their tokens stay in the cache, which serves later queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from ..patch import Setup
from . import short_prefill

_AT_ONCE = 32
"""Maximum queries in one step. One step's answers are sent while the next step is computed."""

_AT_ONCE_WITHOUT_GRAPHS = 64
"""Maximum without CUDA graphs, where a step costs nearly the same for any number of rows."""


class Known:
    """A query and its prefix in the prefix cache.

    Attributes:
        slots: the KV slots of the prefix, int64 [cached].
        node: the node of the cache at which the prefix ends.
        cached: the number of tokens in the prefix.
    """

    __slots__ = ("cached", "node", "request", "slots")

    def __init__(self, request: Any, slots: torch.Tensor, node: Any) -> None:
        self.request = request
        self.slots = slots
        self.node = node
        self.cached = len(slots)

    @property
    def new(self) -> int:
        return len(self.request.input_ids) - self.cached


Answer = Callable[[Sequence[Known], torch.Tensor, Sequence[int]], Callable[[], None]]
"""Prepares the answers to queries from logits.

The arguments are the queries, the logits [rows, vocabulary], and the row of each query. The logits
may change after the call. The result is a function that sends the answers.
"""


def is_query(request: Any) -> bool:
    """Return whether a request asks for no new token and for no logprobs of its prompt."""
    return (
        isinstance(request, TokenizedGenerateReqInput)
        and request.sampling_params.max_new_tokens == 0
        and not request.return_logprob
    )


def install(setup: Setup) -> Callable[[Any], bool]:
    """Return a function that sets the ``sglrl_queries`` of the finished scheduler."""
    answer = None if setup.adapter is None else setup.adapter.answer

    def finish(scheduler: Any) -> bool:
        queries = Queries(scheduler, answer)
        if queries.possible:
            scheduler.sglrl_queries = queries
        return queries.possible

    return finish


class Queries:
    """Answers queries on one rank. All ranks of a replica have the same state and do the same.

    Args:
        answer: prepares the answers. None on ranks that send no answers.
    """

    def __init__(self, scheduler: Any, answer: Answer | None) -> None:
        self._scheduler = scheduler
        self._answer = answer
        self._tree = scheduler.tree_cache
        self._runner = scheduler.tp_worker.model_runner
        arguments = scheduler.server_args
        self.possible = (
            short_prefill.plain(self._runner)
            and type(self._tree) is RadixCache
            and not self._tree.disable
            and not self._tree.disable_finished_insert
            and type(scheduler.token_to_kv_pool_allocator) is TokenToKVPoolAllocator
            and arguments.pp_size == 1
            and arguments.ep_size == 1
            and not arguments.enable_dp_attention
            # These steps would leave tokens in the prefix cache without their routed experts.
            and not arguments.enable_return_routed_experts
        )

    def run(self, requests: list[Any]) -> list[Any]:
        """Answer all queries that need no scheduling. Return the other requests, in their order."""
        others: list[Any] = []
        answer = _nobody
        for step in self._steps(requests, others):
            launched = self._launch(step)
            if launched is None:
                others += [query.request for query in step]
                continue
            answer()
            answer = launched
        answer()
        return others

    def _steps(self, requests: list[Any], others: list[Any]) -> list[list[Known]]:
        """Group the queries into steps. Append the requests that SGLang must run to ``others``."""
        few = most = short_prefill.max_rows(self._runner)
        at_once = _AT_ONCE
        if self._runner.decode_cuda_graph_runner is None:
            at_once = _AT_ONCE_WITHOUT_GRAPHS
            most = max(few, min(at_once, int(self._runner.max_running_requests)))
        steps: list[list[Known]] = []
        rows = attended = 0
        for request in requests:
            query = self._known_prefix(request)
            if query is None or query.new > few:
                others.append(request)
                continue
            rows += query.new
            attended += short_prefill.attended(query.cached, query.new)
            if (
                not steps
                or len(steps[-1]) == at_once
                or rows > most
                or attended > short_prefill.ATTENDED
            ):
                steps.append([])
                rows, attended = query.new, short_prefill.attended(query.cached, query.new)
            steps[-1].append(query)
        return steps

    def _known_prefix(self, request: Any) -> Known | None:
        ids = request.input_ids
        if not 0 < len(ids) <= self._scheduler.max_req_input_len:
            return None
        if len(ids) == 1:
            # SGLang's cache matches nothing for the empty sequence.
            return None
        # If all tokens are cached, compute the last token again.
        key = RadixKey(ids[:-1], request.extra_key)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        return Known(request, match.device_indices, match.last_device_node)

    def _launch(self, step: list[Known]) -> Callable[[], None] | None:
        """Launch a step. Return None if there is no room. SGLang's own scheduling can make room."""
        scheduler = self._scheduler
        # These rows of the table stay marked as free. The step uses them until SGLang's next step,
        # and no request takes a row before that.
        places = scheduler.req_to_token_pool.free_slots[: len(step)]
        if len(places) < len(step):
            return None
        # This allocation evicts nothing, so the matched prefixes stay without a lock.
        slots = scheduler.token_to_kv_pool_allocator.alloc(sum(query.new for query in step))
        if slots is None:
            return None
        overlap = scheduler.enable_overlap
        with scheduler.forward_stream_ctx if overlap else nullcontext():
            if overlap:
                scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            logits = self._logits(step, places, slots)
            answer = _nobody
            if self._answer is not None:
                # The logits have one row per query, or one row per new token.
                rows = np.ones(len(step), np.int64)
                if len(logits) > len(step):
                    rows = np.array([query.new for query in step])
                answer = self._answer(step, logits, (rows.cumsum() - 1).tolist())
        if overlap:
            scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        self._keep(step, slots)
        return answer

    def _logits(self, step: list[Known], places: list[int], slots: torch.Tensor) -> torch.Tensor:
        """Compute the logits, shape [queries, vocabulary] or [rows, vocabulary]."""
        output = self._runner.forward(self._batch(step, places, slots))
        return output.logits_output.next_token_logits

    def _batch(self, step: list[Known], places: list[int], slots: torch.Tensor) -> ForwardBatch:
        """Return a batch with one row per new token (see ``short_prefill``)."""
        device = self._runner.device
        cached = np.array([query.cached for query in step], dtype=np.int64)
        new = np.array([query.new for query in step], dtype=np.int64)
        rows = int(new.sum())
        # Row i of all concatenated rows is token begins[its query] + i.
        begins = cached - (new.cumsum() - new)
        lengths = begins.repeat(new) + np.arange(1, rows + 1)
        tokens = np.concatenate(
            [np.frombuffer(query.request.input_ids, np.int64)[query.cached :] for query in step]
        )
        place = np.array(places, dtype=np.int64)
        # Copy all arrays to the device at once.
        host = np.concatenate([tokens, place.repeat(new), lengths, place, cached])
        on_device = torch.from_numpy(host).to(device, non_blocking=True)
        tokens_, places_, seq_lens, place_, cached_ = on_device.split([rows] * 3 + [len(step)] * 2)
        positions = seq_lens - 1
        table = self._scheduler.req_to_token_pool.req_to_token
        flat = table.view(-1)
        total = int(cached.sum())
        if total:
            # Element i of all concatenated prefixes belongs at offset[its query] + i.
            offset = place_ * table.shape[1] - (cached_.cumsum(0) - cached_)
            at = offset.repeat_interleave(cached_, output_size=total)
            at += torch.arange(total, device=device)
            flat[at] = torch.cat([query.slots for query in step]).to(table.dtype)
        flat[places_ * table.shape[1] + positions] = slots.to(table.dtype)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=rows,
            input_ids=tokens_,
            req_pool_indices=places_,
            seq_lens=seq_lens,
            seq_lens_cpu=torch.from_numpy(lengths),
            seq_lens_sum=int(lengths.sum()),
            orig_seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=slots,
            positions=positions,
            return_logprob=False,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            spec_algorithm=self._runner.spec_algorithm,
            num_token_non_padded_cpu=rows,
        )

    def _keep(self, step: list[Known], slots: torch.Tensor) -> None:
        """Add new tokens to the prefix cache. Free the slots of tokens that it already contains."""
        double = []
        begin = 0
        for query in step:
            end = begin + query.new
            new = slots[begin:end]
            key = RadixKey(query.request.input_ids[query.cached :], query.request.extra_key)
            known, _ = self._tree._insert_helper(query.node, key, new)
            if known:
                double.append(new[:known])
            begin = end
        if double:
            self._scheduler.token_to_kv_pool_allocator.free(torch.cat(double))


def _nobody() -> None:
    pass
