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
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from .attention import BatchedAttention
from .queries import Answer, Known, Queries
from .ragged import decode, plan, token_bytes
from .recorded import MODELS, Inputs, Recorder

_AT_ONCE = 64
_PREFILLED = 2048
"""New tokens at most in one step."""
_SHARED = 16
"""Of queries that have so many new tokens in common one is prefilled first, and the others find
these in the cache."""
_SMALL = 1 << 28
"""Weights of a model whose steps are recorded."""
_REMEMBERED = 1 << 19
"""Tokens of prompts in one generation of ``Ends``, of 8 bytes each."""


def recordable(runner: Any) -> bool:
    """Its steps are what ``Recorder`` takes."""
    return (
        type(runner.model).__name__ in MODELS
        # A larger one computes for longer than Python takes.
        and sum(weights.numel() for weights in runner.model.parameters()) <= _SMALL
        # What the ranks say to each other is no call of PyTorch's.
        and runner.server_args.tp_size == 1
        and type(runner.attn_backend) is BatchedAttention
        and type(runner.token_to_kv_pool) is MHATokenToKVPool
        and runner.sliding_window_size is None
    )


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
        self._recorder: Recorder | None = None
        if self._possible and recordable(self._runner):
            model, pool = self._runner.model, self._runner.token_to_kv_pool
            self._token_bytes = token_bytes(pool.k_buffer[0], pool.v_buffer[0])
            state = [*model.parameters(), *model.buffers(), *pool.k_buffer, *pool.v_buffer]
            self._recorder = Recorder(self._runner, self._runner.attn_backend.attend_to, state)

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

    def _logits(self, step: list[Known], places: list[int], slots: torch.Tensor) -> torch.Tensor:
        put = _Put(step, places, slots, self._scheduler.req_to_token_pool.req_to_token)
        if self._recorder is not None:
            inputs = put.inputs(self._token_bytes)
            if inputs is not None:
                return self._recorder.logits(inputs, lambda: put.batch(self._runner))
        output = self._runner.forward(put.batch(self._runner))
        return output.logits_output.next_token_logits


class _Put:
    """A step, put together: its tokens, one behind the other, and what they attend to. In SGLang's
    ``table`` it takes these ``places``."""

    def __init__(
        self, step: list[Known], places: list[int], slots: torch.Tensor, table: torch.Tensor
    ) -> None:
        self._step = step
        self._places = places
        self._slots = slots
        self._table = table
        self._cached = np.array([query.cached for query in step])
        self._extends = len(slots) > len(step)
        if self._extends:
            self._new = np.array([query.new for query in step])
            self._begins = self._new.cumsum() - self._new
            pieces = [np.frombuffer(q.request.input_ids, np.int64)[q.cached :] for q in step]
            tokens = np.concatenate(pieces)
            positions = np.arange(len(slots)) + (self._cached - self._begins).repeat(self._new)
        else:
            self._new = np.ones_like(self._cached)
            self._begins = np.arange(len(step))
            tokens = np.array([query.request.input_ids[-1] for query in step])
            positions = self._cached
        self._tokens = torch.from_numpy(tokens)
        self._positions = torch.from_numpy(positions)

    def inputs(self, token_bytes: int) -> Inputs | None:
        """For a recording; None: its attention is several calls."""
        if not self._extends:
            contexts = [query.slots.numpy() for query in self._step]
            call = decode(contexts, self._slots.numpy(), token_bytes)
            if call is None:
                return None
            return Inputs(self._tokens, self._positions, self._slots, None, call)
        self._fill()
        begins, counts = torch.from_numpy(self._cached), torch.from_numpy(self._new)
        calls = plan(self._table, torch.tensor(self._places), begins, counts, None, token_bytes)
        if len(calls) > 1:
            return None
        return Inputs(self._tokens, self._positions, self._slots, counts.int(), calls[0])

    def _fill(self) -> None:
        """The rows of the table."""
        table: NDArray[Any] = self._table.numpy()
        given = self._slots.numpy()
        for query, place, begin in zip(self._step, self._places, self._begins, strict=True):
            row = table[place]
            row[: query.cached] = query.slots.numpy()
            row[query.cached : query.cached + query.new] = given[begin : begin + query.new]

    def batch(self, runner: Any) -> ForwardBatch:
        """For SGLang."""
        self._fill()
        count = len(self._tokens)
        lengths = self._cached + self._new
        seq_lens = torch.from_numpy(lengths)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(self._step),
            input_ids=self._tokens,
            req_pool_indices=torch.tensor(self._places),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=int(lengths.sum()),
            orig_seq_lens=torch.from_numpy(lengths.astype(np.int32)),
            out_cache_loc=self._slots,
            positions=self._positions,
            return_logprob=False,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            spec_algorithm=runner.spec_algorithm,
            num_token_non_padded_cpu=count,
        )
        if self._extends:
            batch.forward_mode = ForwardMode.EXTEND
            batch.is_extend_in_batch = True
            batch.extend_num_tokens = count
            batch.extend_seq_lens_cpu = self._new.tolist()
            batch.extend_prefix_lens_cpu = self._cached.tolist()
            batch.extend_logprob_start_lens_cpu = []
            batch.extend_seq_lens, batch.extend_prefix_lens, batch.extend_start_loc = (
                torch.from_numpy(values.astype(np.int32))
                for values in (self._new, self._cached, self._begins)
            )
        return batch
