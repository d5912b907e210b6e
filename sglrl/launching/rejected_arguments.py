"""Fields of SGLang's ``ServerArgs`` that have no effect in a worker, or that break it.

A worker has SGLang's scheduler and no other part of SGLang's server. SGLang would ignore these
fields without a message, hang, or fail in the middle of the start. The names are from SGLang 0.5.17
to 0.5.23.
"""

from __future__ import annotations

from typing import Final

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
        gc_warning_threshold_secs show_time_cost tokenizer_worker_num detokenizer_worker_num
        enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode disable_tokenizer_batch_decode
    """,
    "give sampling parameters to generate, session or rollout": """
        sampling_defaults preferred_sampling_params allow_auto_truncate default_priority_value
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
        stat_loggers enable_expert_distribution_metrics prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets
    """,
    "nothing reads the record of the experts": """
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode
    """,
    "workers get no requests of users to log: use log_dir= for their output": """
        log_requests log_requests_level log_requests_format log_requests_target crash_dump_folder
    """,
    "an engine is one machine's: use replicas= and tp_size=, and hosts= for other machines": """
        nnodes node_rank pp_size pp_max_micro_batch_size pp_async_batch_depth dwdp_size
        gpu_id_step use_ray gated_launch_port ep_join_mode ep_join_rank_offset elastic_ep_backend
        elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout elastic_ep_rejoin
        enable_elastic_expert_backup mooncake_ib_device
    """,
    "attention runs with tensor parallelism only: use tp_size=": """
        enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head
        attn_dp_size attn_cp_size dcp_size moe_dp_size enable_prefill_cp cp_strategy
        enable_prefill_context_parallel prefill_cp_mode enable_dsa_prefill_context_parallel
        dsa_prefill_cp_mode dcp_comm_backend dcp_replicate_q_proj enable_cp_tp_group_sharing
        enable_dsa_cache_layer_split enable_cp_decode_attn_tp enable_kv_cache_sharding
        speculative_skip_dp_mlp_sync
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
    "updates of weights do not reach a draft model": """
        speculative_algorithm speculative_draft_model_path speculative_boundary_reduction
        speculative_draft_model_revision speculative_draft_load_format speculative_num_steps
        speculative_eagle_topk speculative_num_draft_tokens speculative_dflash_block_size
        speculative_domino_candidate_pool_size speculative_dspark_block_size
        speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_use_rejection_sampling
        speculative_use_block_verification speculative_token_map speculative_attention_mode
        speculative_draft_attention_backend speculative_dsa_topk_backend
        speculative_draft_kv_cache_dtype speculative_draft_window_size
        speculative_draft_sink_size speculative_moe_runner_backend speculative_moe_a2a_backend
        speculative_enable_w4a4_mxfp4_megamoe speculative_draft_model_quantization
        enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config spec_trace_dir
        speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens decrypted_draft_config_file
    """,
    "the engine samples one token after the other": """
        dllm_algorithm dllm_algorithm_config dllm_fdfo
    """,
    "a watermark changes the distribution to which logprobs refer": """
        enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window
        watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all
    """,
    "the KV cache is in the memory of the device only": """
        enable_hierarchical_cache hicache_host_memory_mode hicache_ratio hicache_size
        hicache_host_memory_fraction hicache_write_policy hicache_io_backend hicache_mem_layout
        hicache_storage_backend hicache_storage_prefetch_policy
        hicache_storage_backend_extra_config hicache_storage_prefetch_retry_poll_interval
        hicache_storage_prefetch_retry_max_attempts enable_unified_cache_external_linker
        unified_cache_external_linker_backend unified_cache_external_linker_config
        enable_linker_mla_dedup enable_hisparse hisparse_config enable_lmcache
        lmcache_config_file enable_flexkv flexkv_config_file radix_cache_backend
        prefill_only_disable_kv_cache
    """,
    "update_weights writes to the memory of the device only": """
        cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode
        ple_offload_embedding ple_offload_backend ple_offload_dir enable_paged_experts
        paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token
    """,
    "update_weights needs experts that keep their places": """
        ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb
        eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold
    """,
    "quantize the checkpoint before": """
        modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path
        quantize_and_serve
    """,
    "SGLang computes it": """
        uses_mamba_radix_cache _radix_eviction_policy_explicitly_set
        _swa_full_tokens_ratio_explicitly_set _speculative_draft_quantization_explicitly_set
    """,
    "no worker reads it": """
        num_continuous_decode_steps delete_ckpt_after_loading debug_tensor_dump_input_file
        triton_attention_reduce_in_fp32
    """,
    "workers prepare adapters in a thread, check every tensor, and adapt no experts": """
        enable_lora_overlap_loading experts_shared_outer_loras lora_use_virtual_experts
        lora_strict_loading uno_lora_path
    """,
    "use keep_weights= of client.sleep": """
        enable_weights_cpu_backup enable_draft_weights_cpu_backup
    """,
    "a Completion has no such field": """
        enable_return_indexer_topk enable_return_aux_hidden_states aux_hidden_state_capture
        return_aux_hidden_state_layer_ids
    """,
    "use enable_return_hidden_states": "return_hidden_states_mode",
    "use logit_processors=, which names the classes": "enable_custom_logit_processor",
    "the engine only generates text": """
        is_embedding enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num limit_mm_data_per_request enable_mm_global_cache
        disable_fast_image_processor language_model_only mm_feature_transport
        keep_mm_feature_on_device
        allowed_media_domains media_url_max_file_size_mb mm_preprocess_cache_size_mb
        trust_mm_content_hashes image_processor_backend mm_global_cache_backend enable_mis
    """,
    "a call with a higher priority= of generate is the more urgent one": """
        schedule_low_priority_values_first abort_on_priority_when_disabled
    """,
    "sampling masks have no limit for each token": "sampling_mask_max_tokens",
    "use client.session": "enable_streaming_session enable_session_radix_cache",
    "download the revision, and give launch its folder": "revision",
    "use version= of update_weights": "weight_version",
    "use update_weights": """
        custom_weight_loader checkpoint_engine_wait_weights_before_ready weight_cache_mode
        weight_cache_socket
        weight_cache_timeout remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config
    """,
}
REJECTED: Final = {name: why for why, names in _GROUPS.items() for name in names.split()}
"""For each rejected field, the reason and what to use in its place."""
