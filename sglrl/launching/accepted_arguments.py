"""Fields of SGLang's ``ServerArgs`` that ``launch`` accepts.

``launch`` passes most of them on to SGLang. The others have no effect and do no harm. The names are
from SGLang 0.5.17 to 0.5.23. ``rejected_arguments`` has the fields that are rejected.
"""

from __future__ import annotations

import math
from typing import Final

_TESTS: Final = {
    "tests/launching/test_accepted_arguments.py": """
        max_running_requests max_total_tokens max_queued_requests max_prefill_tokens
        prefill_max_requests chunked_prefill_size context_length schedule_policy
        disable_priority_preemption priority_scheduling_preemption_threshold
        radix_eviction_policy disable_radix_cache load_format json_model_override_args
        tokenizer_path trust_remote_code model_impl log_level decode_log_interval gc_threshold
        stream_interval forward_hooks debug_tensor_dump_output_folder debug_tensor_dump_layers
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        grammar_backend enable_fp32_lm_head kv_cache_dtype
    """,
    "tests/engine/test_random_seed.py": "random_seed",
    "tests/control/test_sleep.py": "enable_memory_saver",
    "tests/engine/test_hidden_states.py": "enable_return_hidden_states",
    "tests/engine/test_routed_experts.py": "enable_return_routed_experts",
    "tests/weights/test_lora.py": "lora_paths max_loras_per_batch max_loaded_loras",
    "tests/launching/test_lora_arguments.py": """
        enable_lora max_lora_rank lora_target_modules lora_backend
    """,
    "tests/rollouts/test_back_pressure.py": "schedule_conservativeness",
    "tests/driver/test_priorities.py": "enable_priority_scheduling",
    "tests/engine/test_alike.py": "enable_mixed_chunk disable_overlap_schedule",
    "tests/engine/test_patches.py": "enable_deterministic_inference rl_on_policy_target",
    "tests/gpu/test_gpu.py": "page_size",
    "tests/gpu/conftest.py": """
        attention_backend sampling_backend disable_prefill_cuda_graph mem_fraction_static
    """,
    "tests/gpu/test_experts.py": "ep_size enforce_disable_flashinfer_allreduce_fusion",
}
TESTED: Final = {name: test for test, names in _TESTS.items() for name in names.split()}
"""For each tested field, the test that shows its effect."""

_PASSED_ON: Final = {
    "kernels of attention": """
        enable_lean_attention enable_nvidia_megakernel enable_amd_monokernel
        prefill_kv_cache_dequant_dtype dsa_prefill_backend dsv4_prefill_backend dsa_triton_union
        dsa_decode_backend dsv4_attn_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        prefill_attention_backend decode_attention_backend disable_flashinfer_autotune
        flashinfer_autotune_skip_ops
        triton_attention_num_kv_splits triton_attention_split_tile_size
        flashinfer_mla_disable_ragged enable_fused_qk_norm_rope
        enable_precise_embedding_interpolation enable_deepseek_v4_fp4_indexer
        enable_dsa_fused_indexer disable_chunked_prefix_cache qsa_indexer_dtype
        enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
    """,
    "kernels of linear layers": """
        enable_tf32_matmul fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
    """,
    "models with states instead of a KV cache": """
        mamba_backend mamba_ssm_dtype mamba_max_states_per_path
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        mamba_radix_cache_strategy mamba_track_interval enable_int8_mamba_checkpoint
        int8_mamba_ckpt_size max_mamba_cache_size mamba_full_memory_ratio linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec
    """,
    "CUDA graphs and compilation": """
        disable_cuda_graph cuda_graph_max_bs_decode
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill
        cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill cuda_graph_prefill_max_context cuda_graph_tc_compiler
        disable_decode_cuda_graph disable_cuda_graph_padding enable_profile_cuda_graph
        enable_cudagraph_gc debug_cuda_graph enable_torch_compile
        enable_torch_compile_debug_mode torch_compile_max_bs torchao_config
    """,
    "communication between the GPUs of one engine": """
        enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp
        enable_torch_symm_mem enable_scattered_sconv pre_warm_nccl boundary_reduction
        enable_quant_communications enable_flashinfer_allreduce_fusion
        flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion
        disable_aiter_allreduce_fusion_in_prefill disable_aiter_allreduce_fusion_in_decode
        enable_fused_moe_sum_all_reduce dist_timeout enable_p2p_check disable_attn_tp_gather
        enable_attn_tp_input_scattered enable_tp_lm_head_all_to_all enable_shared_experts_attn_tp
        shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp
        enable_megamoe_for_layernorm_sp numa_node
    """,
    "mixtures of experts": """
        moe_a2a_backend enable_w4a4_mxfp4_megamoe deepep_v2_mode moe_runner_backend
        flashinfer_mxfp4_moe_precision deepep_mode fuseep_mode deepep_dispatcher_output_dtype
        flashinfer_a2a_dispatch_type deepep_config enable_waterfill
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion moe_dense_tp_size enable_two_batch_overlap
        enable_single_batch_overlap tbo_token_distribution_threshold
    """,
    "quantized weights": """
        quantization quantization_param_path modelopt_quant rl_quant_profile
    """,
    "the layout of the KV cache": """
        enable_page_major_kv_layout enable_unified_memory c128_page_size swa_full_tokens_ratio
        swa_prefix_tails disable_hybrid_swa_memory radix_eviction_policy_config
    """,
    "the files of the model": """
        model_loader_extra_config model_config_parser startup_weight_load_mode
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load model_checksum decrypted_config_file
        tokenizer_mode tokenizer_backend download_dir weight_loader_disable_mmap
    """,
    "scheduling": """
        retraction_policy
        prefill_decode_interval prefill_decode_interval_min_bs enable_dynamic_chunking
        scheduler_recv_interval enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms min_free_slots_delay
    """,
    "adapters": "lora_eviction_policy max_lora_chunk_size lora_drain_wait_threshold",
    "grammars": "constrained_json_max_whitespace_cnt disable_outlines_disk_cache",
    "finding faults": """
        kv_canary kv_canary_real_data kv_canary_sweep_interval msprobe_dump_config
        enable_layerwise_nvtx_marker
    """,
    "other hardware": "mlx_enable_sampling",
}
PASSED_ON: Final = {name: about for about, names in _PASSED_ON.items() for name in names.split()}
"""The subject of each field that SGLang's scheduler reads and that has no test of its effect."""

HARMLESS: Final = {
    "skip_server_warmup": "there is no server to warm up",
    "sleep_on_idle": "idle workers always sleep",
    "incremental_streaming_output": "streams always yield new tokens only",
    "batch_notify_size": "the driver wakes callers once for each message of a worker",
}
"""For each field without any effect, the reason why no effect is needed."""

_BELOW_ZERO: Final = {"chunked_prefill_size", "mamba_max_states_per_path"}
_SHARES: Final = {"mem_fraction_static", "swa_full_tokens_ratio"}
_POSITIVE: Final = {
    "context_length",
    "max_running_requests",
    "max_total_tokens",
    "max_prefill_tokens",
    "prefill_max_requests",
    "page_size",
    "stream_interval",
    "decode_log_interval",
    "schedule_conservativeness",
}


def wrong_range(name: str, value: object) -> str | None:
    """Return the allowed range of a field if ``value`` is a number outside of it, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if name in _SHARES:
        return None if 0 < value <= 1 else "more than 0 and at most 1"
    if name in _POSITIVE:
        return None if 0 < value < math.inf else "more than 0"
    least = -1 if name in _BELOW_ZERO else 0
    return None if least <= value < math.inf else f"at least {least}"
