"""Fields of SGLang's ``ServerArgs`` that have no effect in a worker, or that break it.

A worker owns SGLang's scheduler and nothing else of its server. SGLang would accept these fields
without a message, hang, or fail in the middle of the start. Names are those of 0.5.17 to 0.5.23.
"""

from __future__ import annotations

from typing import Any, Final

from ..errors import UsageError

_GROUPS: Final = {
    "workers have no HTTP server: use sglrl.serve or the command sglrl serve": """
        fastapi_root_path enable_http_worker_reuseport smg_grpc_mode grpc_mode grpc_port
        grpc_response_timeout_secs grpc_worker_threads sidecar sidecar_args warmups
        enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        served_model_name file_storage_path tool_server enable_response_store
        log_level_http uvicorn_access_log_exclude_prefixes asr_max_buffer_seconds
        asr_max_concurrent_sessions stream_response_default_include_usage
        smg_http_sidecar_port
    """,
    "the driver applies chat templates and parses answers: use renderer= and template= of generate "
    "and session": """
        chat_template trust_request_chat_template hf_chat_template_name completion_template
        reasoning_parser default_chat_template_kwargs strip_thinking_cache enable_strict_thinking
        tool_call_parser
    """,
    "the driver tokenizes": """
        tokenizer_worker_num detokenizer_worker_num enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    """,
    "give sampling parameters to generate, session or rollout": """
        sampling_defaults preferred_sampling_params allow_auto_truncate
    """,
    "every Completion has them": """
        enable_cache_report return_input_ids return_output_ids
    """,
    "use client.stats(), or /metrics of sglrl.serve": """
        enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval load_publish_endpoint
        tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels
        extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency
        bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        enable_request_time_stats_logging kv_events_config enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
        otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir
        stat_loggers enable_expert_distribution_metrics
    """,
    "workers get no requests of users to log: use log_dir= for their output": """
        log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder
    """,
    "an engine is one machine's: use replicas= and tp_size=, and hosts= for other machines": """
        nnodes node_rank pp_size pp_max_micro_batch_size pp_async_batch_depth dwdp_size
        gpu_id_step use_ray gated_launch_port ep_join_mode ep_join_rank_offset elastic_ep_backend
        elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout elastic_ep_rejoin
        enable_elastic_expert_backup
    """,
    "attention runs with tensor parallelism only: use tp_size=": """
        enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
        attn_dp_size attn_cp_size dcp_size moe_dp_size enable_prefill_cp cp_strategy
        enable_prefill_context_parallel prefill_cp_mode enable_dsa_prefill_context_parallel
        dsa_prefill_cp_mode
    """,
    "the driver selects workers: use routing=": "load_balance_method",
    "the driver finds workers that hang: use hang_timeout=": "soft_watchdog_timeout",
    "the driver ends workers": "custom_sigquit_handler",
    "prefill and decoding run in the same engine": """
        disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port
        disaggregation_ib_device disaggregation_decode_enable_radix_cache
        disaggregation_decode_enable_offload_kvcache disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval disaggregation_decode_allocation_policy
        disaggregation_enable_kv_checksum disaggregation_decode_retraction_backup
        disaggregation_decode_host_receive_threshold num_reserved_decode_tokens
        enable_pd_role_switch optimistic_prefill_attempts encoder_only language_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder enable_pdmux pdmux_config_path sm_group_num
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        decoupled_spec_role
    """,
    "there are no adapters: merge them into the weights, and use update_weights": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths
        max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend max_lora_chunk_size
        experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
        lora_drain_wait_threshold uno_lora_path
    """,
    "engines cannot sleep": """
        enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup
    """,
    "a Completion has no such field": """
        enable_return_hidden_states return_hidden_states_mode enable_return_routed_experts
        enable_return_indexer_topk enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids
    """,
    "use logit_bias or a grammar of generate": "enable_custom_logit_processor",
    "the engine only generates text": """
        is_embedding enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num limit_mm_data_per_request enable_mm_global_cache
        disable_fast_image_processor mm_feature_transport keep_mm_feature_on_device
        allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb
        trust_mm_content_hashes image_processor_backend mm_global_cache_backend enable_mis
    """,
    "use client.session": "enable_streaming_session enable_session_radix_cache",
    "use version= of update_weights": "weight_version",
    "use update_weights": """
        checkpoint_engine_wait_weights_before_ready weight_cache_mode weight_cache_socket
        weight_cache_timeout remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config
    """,
}
REJECTED: Final = {name: why for why, names in _GROUPS.items() for name in names.split()}
"""By field: why, and what takes its place."""


def check_rejected(name: str, value: Any, default: Any) -> None:
    """Check that an argument is not one that cannot work.

    Args:
        default: a value that asks for nothing. None and False ask for nothing too.

    Raises:
        UsageError: it is.
    """
    if name not in REJECTED or value is None or value is False:
        return
    if type(value) is not type(default) or value != default:
        raise UsageError(f"{name}={value!r:.200} is not supported: {REJECTED[name]}")
