"""What an engine reports: its model and limits, and its load."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sglrl.wire.engine import EngineInfo, EngineStats

from . import compat

if TYPE_CHECKING:
    from .adapter import Adapter


def engine_stats(adapter: Adapter) -> EngineStats:
    """Return the load of the engine and its counters."""
    scheduler = adapter.scheduler
    used, capacity = scheduler.kv_tokens()
    uptime = time.monotonic() - adapter.begun
    return EngineStats(
        running=scheduler.sglrl_running(),
        waiting=scheduler.sglrl_waiting() + len(adapter.draining.held_back),
        kv_tokens=used,
        kv_capacity=capacity,
        prompt_tokens=adapter.prompt_tokens,
        cached_tokens=adapter.cached_tokens,
        generated_tokens=adapter.generated_tokens,
        uptime=uptime,
        tokens_per_second=adapter.generated_tokens / uptime if uptime else 0.0,
        draining=adapter.draining.waiting is not None,
    )


def engine_info(adapter: Adapter) -> EngineInfo:
    """Return the model of the engine and its limits."""
    scheduler = adapter.scheduler
    config = scheduler.model_config
    eos = config.hf_eos_token_id
    eos_ids = sorted(eos) if isinstance(eos, (set, list, tuple)) else [eos] if eos else []
    device = scheduler.device
    return EngineInfo(
        model=scheduler.server_args.model_path,
        architecture=config.hf_config.architectures[0],
        dtype=str(config.dtype).removeprefix("torch."),
        device=device if device == "cpu" else f"{device}:{scheduler.sglrl_gpu}",
        vocab_size=config.vocab_size,
        context_length=config.context_len,
        # SGLang rejects an input of max_req_input_len.
        max_prompt_tokens=scheduler.max_req_input_len - 2,
        max_total_tokens=scheduler.max_req_input_len - 1,
        eos_token_ids=[int(i) for i in eos_ids],
        kv_cache_tokens=scheduler.max_total_num_tokens,
        priority_scheduling=bool(scheduler.enable_priority_scheduling),
        sglang_version=compat.VERSION,
        tp_size=scheduler.server_args.tp_size,
        accelerations=adapter.accelerations,
        tokenizer=scheduler.server_args.tokenizer_path or "",
        **adapter.lora.limits,
    )
