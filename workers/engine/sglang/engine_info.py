"""The description of a loaded model."""

from __future__ import annotations

from typing import Any

from sglrl.wire.engine import EngineInfo

from . import compat


def engine_info(scheduler: Any, accelerations: tuple[str, ...]) -> EngineInfo:
    """Return the model and the limits of a scheduler.

    Args:
        accelerations: names of the accelerations that are on.
    """
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
        accelerations=accelerations,
        tokenizer=scheduler.server_args.tokenizer_path or "",
    )
