"""SGLang's command-line options that are not fields of ``ServerArgs``.

The tables contain the options of all supported SGLang versions. In SGLang's ``server_args.py``,
such an option is either one of the ``aliases=`` of a field, or an argument of the parser with a
``Deprecated...Action``.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

from ..config import flag
from ..errors import UsageError

ALIASES: Final = {
    "attention_context_parallel_size": "attn_cp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "context_bucket": "cuda_graph_prefill_max_context",
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "decode_context_parallel_size": "dcp_size",
    "enable_hicache": "enable_hierarchical_cache",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "grpc_http_sidecar_port": "smg_http_sidecar_port",
    "hierarchical_sparse_attention_extra_config": "hisparse_config",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
    "moe_data_parallel_size": "moe_dp_size",
    "nccl_init_addr": "dist_init_addr",
    "nsa_decode_backend": "dsa_decode_backend",
    "nsa_prefill_backend": "dsa_prefill_backend",
    "nsa_prefill_cp_mode": "dsa_prefill_cp_mode",
    "piecewise_cuda_graph_compiler": "cuda_graph_tc_compiler",
    "piecewise_cuda_graph_max_tokens": "cuda_graph_max_bs_prefill",
    "piecewise_cuda_graph_tokens": "cuda_graph_bs_prefill",
    "pipeline_parallel_size": "pp_size",
    "speculative_dflash_draft_window_size": "speculative_draft_window_size",
    "speculative_draft_model": "speculative_draft_model_path",
}
"""For each option that has a value, the field that takes this value."""

FLAGS: Final[dict[str, tuple[str, Any]]] = {
    "disable_piecewise_cuda_graph": ("cuda_graph_backend_prefill", "disabled"),
    "enable_breakable_cuda_graph": ("cuda_graph_backend_prefill", "breakable"),
    "enable_gdn_replayssm_spec": ("enable_linear_replayssm_spec", True),
    "enable_nsa_prefill_context_parallel": ("enable_dsa_prefill_context_parallel", True),
    "enforce_piecewise_cuda_graph": ("cuda_graph_backend_prefill", "tc_piecewise"),
    "stream_output": ("incremental_streaming_output", True),
}
"""For each option that is True or False, the field and the value that True sets. False has no
effect."""


def without_aliases(args: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """Replace the aliases in an engine's arguments by the names of their fields.

    A name in ``known`` stays as it is. So does an alias of a field that is not in ``known``.

    Args:
        args: the arguments by field name or alias.
        known: the names of the engine's fields.

    Raises:
        UsageError: a flag is neither True nor False, or two names set the same field.
    """
    arguments: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in args.items():
        field = name
        if name not in known:
            if name in FLAGS and FLAGS[name][0] in known:
                if not flag(name, value):
                    continue
                field, value = FLAGS[name]
            elif ALIASES.get(name) in known:
                field = ALIASES[name]
        if field in arguments:
            raise UsageError(f"{source[field]} and {name} set the same field: give one of them")
        arguments[field] = value
        source[field] = name
    return arguments
