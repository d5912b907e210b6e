"""Run a prefill of few tokens as a decode step, and therefore as one CUDA graph.

Each new token becomes a separate row. The row has the KV cache slots of its request, and a context
that ends with its token. In every layer, the keys and values of all rows are written before any row
attends. Each row thus attends to the earlier tokens of its request, as in a prefill.

SGLang launches even a short prefill kernel by kernel from Python. On an H200 a query for the next
token of a 0.6B model took 20 ms this way. As a decode step it takes 4 ms.

Short prefills are common: queries that extend prompts token by token, turns that add a few tokens
to a conversation, and samples whose prompt has a cached prefix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from ..patch import Setup

_WITHOUT_GRAPHS = 16
"""Maximum rows without CUDA graphs, where a decode step is as fast as a short prefill."""

ATTENDED = 1 << 16
"""Maximum context of all rows together, in tokens, if a request has several rows.

A prefill reads its context once. In a decode step, each row reads the context again.
"""


def install(setup: Setup) -> Callable[[Any], bool]:
    """Return a function that makes the model runner run short prefills as decode steps.

    Some models and ways of decoding need a real prefill (see ``plain``), so their runners do not
    change. All ranks decide the same.
    """
    return _wrap


def _wrap(scheduler: Any) -> bool:
    runner = scheduler.tp_worker.model_runner
    if not plain(runner):
        return False
    forward = runner.forward

    def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_short(batch, max_rows(runner)):
            return forward(batch, *args, **kwargs)
        rows, last = as_rows(batch)
        output = forward(rows, *args, **kwargs)
        if last is not None:
            logits = output.logits_output
            logits.next_token_logits = logits.next_token_logits.index_select(0, last)
        return output

    runner.forward = run
    return True


def plain(runner: Any) -> bool:
    """Return whether requests of the runner have KV caches and no other state.

    Examples of other state are a recurrent state, a second pool for a sliding window, an encoder,
    a LoRA adapter and a draft model.
    """
    config = runner.model_config
    return (
        type(runner.req_to_token_pool) is ReqToTokenPool
        and runner.spec_algorithm.is_none()
        and not runner.is_hybrid_swa
        and not config.is_encoder_decoder
        and not config.is_multimodal
        and not runner.server_args.enable_lora
    )


def max_rows(runner: Any) -> int:
    """Return the maximum number of rows for which the conversion is worthwhile."""
    graphs = runner.decode_cuda_graph_runner
    if graphs is not None:
        return int(graphs.max_bs)
    # SGLang's buffers for a decode step have room for at most this many requests.
    return min(_WITHOUT_GRAPHS, int(runner.max_running_requests))


def is_short(batch: Any, most: int) -> bool:
    """Return whether a batch is a short prefill that needs only each request's last logits.

    A prefill is short if it has one token per request, or at most ``most`` tokens in all.
    """
    tokens = batch.extend_num_tokens
    return (
        batch.forward_mode == ForwardMode.EXTEND
        and (tokens == batch.batch_size or tokens <= most)
        and sum(map(attended, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu)) <= ATTENDED
        and not _wants_prompt_logprobs(batch)
        and batch.capture_hidden_mode == CaptureHiddenMode.NULL
        and batch.input_embeds is None
        and batch.replace_embeds is None
        # Attention across data parallel ranks plans its batches in advance.
        and batch.global_num_tokens_cpu is None
    )


def _wants_prompt_logprobs(batch: Any) -> bool:
    return batch.return_logprob and any(
        start < count
        for start, count in zip(
            batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=True
        )
    )


def attended(begin: int, count: int) -> int:
    """Return the total number of context tokens of ``count`` rows after ``begin`` tokens.

    Return 0 for a single row, because it reads no more than a prefill.
    """
    return 0 if count == 1 else count * begin + count * (count + 1) // 2


def as_rows(batch: Any) -> tuple[Any, torch.Tensor | None]:
    """Convert a prefill of [requests] to the equivalent decode step of [tokens] rows.

    Returns:
        The decode step, and the row of each request's last token, int64 [requests]. The second
        value is None if each request has only one row.
    """
    rows = copy.copy(batch)
    rows.forward_mode = ForwardMode.DECODE
    tokens = batch.extend_num_tokens
    if tokens == batch.batch_size:
        return rows, None
    counts = batch.extend_seq_lens.long()

    def repeated(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(counts, output_size=tokens)

    rows.batch_size = tokens
    rows.req_pool_indices = repeated(batch.req_pool_indices)
    rows.seq_lens = (batch.positions + 1).to(batch.seq_lens.dtype)
    lengths = np.concatenate(
        [
            np.arange(begin + 1, begin + count + 1)
            for begin, count in zip(
                batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True
            )
        ]
    )
    rows.seq_lens_sum = int(lengths.sum())
    if batch.seq_lens_cpu is not None:
        rows.seq_lens_cpu = torch.from_numpy(lengths).to(batch.seq_lens_cpu.dtype)
    if batch.orig_seq_lens is not None:
        rows.orig_seq_lens = repeated(batch.orig_seq_lens)
    return rows, counts.cumsum(0) - 1
