"""The reports of an engine to the driver: its model, its limits and its load."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sglrl.wire.engine import EngineInfo, EngineStats

from . import compat
from .patches import logit_processors, routed_experts
from .request_table import RequestTable


def engine_stats(table: RequestTable, draining: bool) -> EngineStats:
    """Return the load and the counters of the engine.

    Args:
        draining: whether a command waits until the running requests finish.
    """
    scheduler = table.scheduler
    used, capacity = scheduler.kv_tokens()
    now = time.monotonic()
    return EngineStats(
        running=scheduler.sglrl_running(),
        waiting=scheduler.sglrl_waiting() + len(table.held_back),
        kv_tokens=used,
        kv_capacity=capacity,
        prompt_tokens=table.prompt_tokens,
        cached_tokens=table.cached_tokens,
        generated_tokens=table.generated_tokens,
        uptime=now - table.begun,
        tokens_per_second=table.rate.per_second(now),
        draining=draining,
        asleep=tuple(sorted(scheduler.sglrl_sleep.asleep)),
    )


def engine_info(
    scheduler: Any, accelerations: tuple[str, ...], adapters: Mapping[str, Any]
) -> EngineInfo:
    """Return the model and the limits of the engine.

    Args:
        accelerations: the names of the accelerations that are on.
        adapters: the fields of ``EngineInfo`` that concern LoRA adapters.
    """
    config = scheduler.model_config
    eos = config.hf_eos_token_id
    eos_ids = sorted(eos) if isinstance(eos, (set, list, tuple)) else [eos] if eos else []
    device, args = scheduler.device, scheduler.server_args
    return EngineInfo(
        model=args.model_path,
        architecture=config.hf_config.architectures[0],
        dtype=str(config.dtype).removeprefix("torch."),
        device=device if device == "cpu" else f"{device}:{scheduler.sglrl_gpu}",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size if args.enable_return_hidden_states else 0,
        context_length=config.context_len,
        # SGLang rejects a prompt whose length is max_req_input_len.
        max_prompt_tokens=scheduler.max_req_input_len - 2,
        max_total_tokens=scheduler.max_req_input_len - 1,
        eos_token_ids=[int(i) for i in eos_ids],
        kv_cache_tokens=scheduler.max_total_num_tokens,
        priority_scheduling=bool(scheduler.enable_priority_scheduling),
        sglang_version=compat.VERSION,
        tp_size=args.tp_size,
        accelerations=accelerations,
        tokenizer=args.tokenizer_path or "",
        sleep_tags=scheduler.sglrl_sleep.possible,
        routed_experts=routed_experts.shape(),
        logit_processors=logit_processors.names(),
        **adapters,
    )
