"""Queries for the next token, past SGLang's scheduling.

Who asks for distributions one token after the other, as genlm's inference does, asks with what the
prefix cache knows but for the last token. All that is to be done for such a query is one row of a
decode step and one token more in the cache; SGLang makes a request of it that is queued, admitted,
allocated for, prefilled, sampled, finished and reported, for half a millisecond of its thread. Here
the queries that have arrived are decode steps between two of SGLang's own, with its model runner,
its memory and its prefix cache, which it finds as its own requests would have left them. A query
with a few tokens more is as many rows (``short_prefill.py``).

Queries that are anything else go to SGLang, and what they leave in the cache serves the next ones.
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

from . import short_prefill

_AT_ONCE = 32
"""So many at most in one step: the answers of one leave while the next one is computed."""

_AT_ONCE_WITHOUT_GRAPHS = 64
"""There a step costs nearly the same whatever its rows."""


class Known:
    """A query, and what the prefix cache has of it: KV slots, int64 [cached], and the node where
    they end."""

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
"""Called with queries, logits, [rows, vocabulary], and each query's row. The logits may change when
it has returned; what it returns sends the answers."""


def is_query(request: Any) -> bool:
    """SGLang is asked for no new token, and for none of the prompt's logprobs."""
    return (
        isinstance(request, TokenizedGenerateReqInput)
        and request.sampling_params.max_new_tokens == 0
        and not request.return_logprob
    )


class Queries:
    """Of one rank. Every rank of a replica finds the same state, so does the same.

    Args:
        answer: None on ranks that answer nobody.
    """

    def __init__(self, scheduler: Any, answer: Answer | None) -> None:
        self._scheduler = scheduler
        self._answer = answer
        self._tree = scheduler.tree_cache
        self._runner = scheduler.tp_worker.model_runner
        arguments = scheduler.server_args
        self._possible = (
            short_prefill.plain(self._runner)
            and type(self._tree) is RadixCache
            and not self._tree.disable
            and not self._tree.disable_finished_insert
            and type(scheduler.token_to_kv_pool_allocator) is TokenToKVPoolAllocator
            and arguments.pp_size == 1
            and arguments.ep_size == 1
            and not arguments.enable_dp_attention
        )

    def run(self, requests: list[Any]) -> list[Any]:
        """Answer those that can be; return the others, in their order."""
        if not self._possible:
            return requests
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
        """Group the queries into steps. Append to ``others`` the requests that SGLang must run."""
        few = most = short_prefill.most_rows(self._runner)
        at_once = _AT_ONCE
        if self._runner.decode_cuda_graph_runner is None:
            at_once = _AT_ONCE_WITHOUT_GRAPHS
            most = max(few, min(at_once, int(self._runner.max_running_requests)))
        steps: list[list[Known]] = []
        rows = attended = 0
        for request in requests:
            query = self._look_up(request)
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

    def _look_up(self, request: Any) -> Known | None:
        ids = request.input_ids
        if not 0 < len(ids) <= self._scheduler.max_req_input_len:
            return None
        if len(ids) == 1:
            # SGLang matches nothing for the empty sequence.
            return None
        # Of what is cached as a whole, the last token is computed again.
        key = RadixKey(ids[:-1], request.extra_key)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        return Known(request, match.device_indices, match.last_device_node)

    def _launch(self, step: list[Known]) -> Callable[[], None] | None:
        """None if there is no room: SGLang makes some."""
        scheduler = self._scheduler
        # Rows of the table that are free stay so: they are used until SGLang's next step, and
        # nobody takes one before.
        places = scheduler.req_to_token_pool.free_slots[: len(step)]
        if len(places) < len(step):
            return None
        # Nothing is evicted: what was matched stays, without a lock.
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
                # One for each query, or for each row.
                rows = np.ones(len(step), np.int64)
                if len(logits) > len(step):
                    rows = np.array([query.new for query in step])
                answer = self._answer(step, logits, (rows.cumsum() - 1).tolist())
        if overlap:
            scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        self._keep(step, slots)
        return answer

    def _logits(self, step: list[Known], places: list[int], slots: torch.Tensor) -> torch.Tensor:
        """[queries, vocabulary], or [rows, vocabulary]."""
        output = self._runner.forward(self._batch(step, places, slots))
        return output.logits_output.next_token_logits

    def _batch(self, step: list[Known], places: list[int], slots: torch.Tensor) -> ForwardBatch:
        """A row for each new token: see ``short_prefill``."""
        device = self._runner.device
        cached = np.array([query.cached for query in step], dtype=np.int64)
        new = np.array([query.new for query in step], dtype=np.int64)
        rows = int(new.sum())
        # Row i of all, one behind the other, is token begins[its query] + i.
        begins = cached - (new.cumsum() - new)
        lengths = begins.repeat(new) + np.arange(1, rows + 1)
        tokens = np.concatenate(
            [np.frombuffer(query.request.input_ids, np.int64)[query.cached :] for query in step]
        )
        place = np.array(places, dtype=np.int64)
        # One copy to the device.
        host = np.concatenate([tokens, place.repeat(new), lengths, place, cached])
        on_device = torch.from_numpy(host).to(device, non_blocking=True)
        tokens_, places_, seq_lens, place_, cached_ = on_device.split([rows] * 3 + [len(step)] * 2)
        positions = seq_lens - 1
        table = self._scheduler.req_to_token_pool.req_to_token
        flat = table.view(-1)
        total = int(cached.sum())
        if total:
            # Element i of all prefixes, one behind the other, belongs at offset[its query] + i.
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
        """In the prefix cache, behind what was matched; what it has by now is given back."""
        double = []
        begin = 0
        for query in step:
            end = begin + query.new
            new = slots[begin:end]
            key = RadixKey(query.request.input_ids[query.cached :], query.request.extra_key)
            found, _ = self._tree._insert_helper(query.node, key, new)
            if found:
                double.append(new[:found])
            begin = end
        if double:
            self._scheduler.token_to_kv_pool_allocator.free(torch.cat(double))


def _nobody() -> None:
    pass
