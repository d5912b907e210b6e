"""A prefill that adds one token to every request is a decode step in all but name: the same input,
positions and places in the KV cache. SGLang launches it kernel by kernel from Python all the same,
where a decode step is one CUDA graph: on an H200 a query for the next token of a 0.6B model took
20 ms, and takes 6 to 9.

That is what such queries are, each longer by one token than the one before; and samples of one
prompt that ask for no logprobs, where the prefix cache knows the prompt but for its last token.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode


def install(runner: Any) -> None:
    """Make this model runner do so, unless its model or its way of decoding is one where both
    differ. Call on every rank: what a batch is run as must be the same on all."""
    if not _plain(runner):
        return
    forward = runner.forward

    def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not adds_one_token(batch):
            return forward(batch, *args, **kwargs)
        batch.forward_mode = ForwardMode.DECODE
        try:
            return forward(batch, *args, **kwargs)
        finally:
            # Results are processed as those of a prefill, which it is for the scheduler.
            batch.forward_mode = ForwardMode.EXTEND

    runner.forward = run


def _plain(runner: Any) -> bool:
    """Its requests have KV caches and no other state: no recurrent one that a prefill begins, no
    second pool for a sliding window, no encoder, adapter or draft model."""
    config = runner.model_config
    return (
        type(runner.req_to_token_pool) is ReqToTokenPool
        and runner.spec_algorithm.is_none()
        and not runner.is_hybrid_swa
        and not config.is_encoder_decoder
        and not config.is_multimodal
        and not runner.server_args.enable_lora
    )


def adds_one_token(batch: Any) -> bool:
    """It is a prefill of one token each, whose logits alone are wanted."""
    return (
        batch.forward_mode == ForwardMode.EXTEND
        and batch.extend_num_tokens == batch.batch_size
        # Those of a prompt come from a prefill; SGLang has one flag for these and all others.
        and not batch.return_logprob
        and batch.capture_hidden_mode == CaptureHiddenMode.NULL
        and batch.input_embeds is None
        and batch.replace_embeds is None
        # Attention that is spread over data parallel ranks plans batches ahead.
        and batch.global_num_tokens_cpu is None
    )
