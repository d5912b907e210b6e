"""Queries for the next token on a CPU, where a step of a small model takes as long as its calls of
PyTorch do, and nothing is computed while Python runs. So a step takes more of them, is a prefill
where one has several new tokens, and is put together by numpy in the memory that the engine reads;
and where a prompt ends in the prefix cache is remembered, for the one that goes on from there.
Answers leave at once, so that who asked can go on on another core.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from .queries import Answer, Known, Queries

_AT_ONCE = 64
_PREFILLED = 2048
"""New tokens at most in one step."""
_SHARED = 16
"""Of queries that have so many new tokens in common one is prefilled first, and the others find
these in the cache."""
_REMEMBERED = 1 << 19
"""Tokens of prompts in one generation of ``Ends``, of 8 bytes each."""

Prompt = tuple[str | None, bytes]
"""What its cached tokens may be shared with, and its ids."""


class Ends:
    """Where prompts end in the prefix cache: their slots, int64 [n], and the last node.

    Two generations: when one is full, the one before it is forgotten. A node that is still its
    parent's child is in the cache, and so are all before it: only leaves are evicted. If another
    prompt splits it, it remains the last part.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._root: Any = None
        self._young: dict[Prompt, tuple[torch.Tensor, Any]] = {}
        self._old: dict[Prompt, tuple[torch.Tensor, Any]] = {}
        self._tokens = 0

    def put(self, prompt: Prompt, slots: torch.Tensor, node: Any) -> None:
        if self._tokens > _REMEMBERED:
            self._old, self._young, self._tokens = self._young, {}, 0
        self._young[prompt] = slots, node
        self._tokens += len(slots)

    def get(self, prompt: Prompt) -> tuple[torch.Tensor, Any] | None:
        if self._root is not self._tree.root_node:
            # All has been flushed.
            self._root = self._tree.root_node
            self._young, self._old, self._tokens = {}, {}, 0
        end = self._young.get(prompt) or self._old.get(prompt)
        if end is None:
            return None
        node = end[1]
        if node.parent.children.get(node.key.child_key(self._tree.page_size)) is not node:
            return None
        # As if it had been looked for.
        node.last_access_time = time.monotonic()
        return end


class CpuQueries(Queries):
    """In the place of ``Queries``, where SGLang does not overlap its steps."""

    answers_first = True

    def __init__(self, scheduler: Any, answer: Answer | None) -> None:
        super().__init__(scheduler, answer)
        self._ends = Ends(self._tree) if self._possible else None

    def _steps(
        self, requests: list[Any], others: list[Any], last: bool
    ) -> tuple[list[list[Known]], list[Any]]:
        chunk = self._scheduler.chunked_prefill_size or 0
        most = min(_PREFILLED, chunk) if chunk > 0 else _PREFILLED
        at_once = min(_AT_ONCE, int(self._runner.max_running_requests))
        steps: list[list[Known]] = []
        later: list[Any] = []
        begun: set[tuple[int, bytes]] = set()
        tokens = 0
        for request in requests:
            query = self._look_up(request)
            if query is None or query.new > most:
                others.append(request)
                continue
            if query.new > 1:
                new = request.input_ids[query.cached : query.cached + _SHARED]
                begin = (id(query.node), new.tobytes())
                if begin in begun and not last:
                    later.append(request)
                    continue
                begun.add(begin)
            tokens += query.new
            if not steps or len(steps[-1]) == at_once or tokens > most:
                steps.append([])
                tokens = query.new
            steps[-1].append(query)
        return steps, later

    def _look_up(self, request: Any) -> Known | None:
        assert self._ends is not None
        ids = request.input_ids
        if len(ids) <= self._scheduler.max_req_input_len:
            end = self._ends.get((request.extra_key, ids[:-1].tobytes()))
            if end is not None:
                return Known(request, *end)
        return super()._look_up(request)

    def _kept(self, query: Known, slots: torch.Tensor, node: Any) -> None:
        assert self._ends is not None
        prompt = query.request.extra_key, query.request.input_ids.tobytes()
        self._ends.put(prompt, torch.cat((query.slots, slots)), node)

    def _batch(self, step: list[Known], places: list[int], slots: torch.Tensor) -> ForwardBatch:
        cached = np.array([query.cached for query in step])
        new = np.array([query.new for query in step])
        begins = new.cumsum() - new
        count = int(new.sum())
        tokens = np.empty(count, np.int64)
        positions = np.empty(count, np.int64)
        table: NDArray[Any] = self._scheduler.req_to_token_pool.req_to_token.numpy()
        given = slots.numpy()
        for query, place, begin in zip(step, places, begins.tolist(), strict=True):
            first, last = query.cached, query.cached + query.new
            end = begin + query.new
            tokens[begin:end] = np.frombuffer(query.request.input_ids, np.int64)[first:]
            positions[begin:end] = np.arange(first, last)
            row = table[place]
            row[:first] = query.slots.numpy()
            row[first:last] = given[begin:end]
        lengths = cached + new
        seq_lens = torch.from_numpy(lengths)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(step),
            input_ids=torch.from_numpy(tokens),
            req_pool_indices=torch.tensor(places),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(lengths.sum()),
            orig_seq_lens=torch.from_numpy(lengths.astype(np.int32)),
            out_cache_loc=slots,
            positions=torch.from_numpy(positions),
            return_logprob=False,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            spec_algorithm=self._runner.spec_algorithm,
            num_token_non_padded_cpu=count,
        )
        if count > len(step):
            batch.forward_mode = ForwardMode.EXTEND
            batch.is_extend_in_batch = True
            batch.extend_num_tokens = count
            batch.extend_seq_lens_cpu = new.tolist()
            batch.extend_prefix_lens_cpu = cached.tolist()
            batch.extend_logprob_start_lens_cpu = []
            batch.extend_seq_lens, batch.extend_prefix_lens, batch.extend_start_loc = (
                torch.from_numpy(values.astype(np.int32)) for values in (new, cached, begins)
            )
        return batch
