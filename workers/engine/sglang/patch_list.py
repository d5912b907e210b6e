"""All modifications of SGLang, in the order of their installation."""

from __future__ import annotations

from typing import Final

from .patch import Patch

_MANAGERS: Final = "sglang.srt.managers"
_BATCH: Final = f"{_MANAGERS}.schedule_batch"
_SCHEDULER: Final = f"{_MANAGERS}.scheduler:Scheduler"
_COMPONENTS: Final = f"{_MANAGERS}.scheduler_components"
_RESULTS: Final = f"{_COMPONENTS}.batch_result_processor:SchedulerBatchResultProcessor"
_STREAMER: Final = f"{_COMPONENTS}.output_streamer"
_SAMPLER: Final = "sglang.srt.layers.sampler:Sampler"
_SAMPLING: Final = "sglang.srt.sampling"
_RUNNER: Final = "sglang.srt.model_executor.model_runner:ModelRunner"
_FORWARD_BATCH: Final = "sglang.srt.model_executor.forward_batch_info:ForwardBatch"
_CACHE: Final = "sglang.srt.mem_cache"
_LORA: Final = "sglang.srt.lora"
_CAPTURE: Final = "sglang.srt.state_capturer"
_DISPATCH: Final = "sglang.srt.layers.moe.token_dispatcher.standard"
_GRAMMAR: Final = "sglang.srt.constrained.xgrammar_backend"

PATCHES: Final = (
    Patch(
        name="cpu_kernels",
        why="SGLang's wheels call CUDA and Triton kernels on a CPU, and pad layers with garbage",
        module="patches.cpu_kernels",
        device="cpu",
        wraps=(
            "sglang.srt.layers.rotary_embedding.base:_is_cpu",
            "sglang.srt.configs.update_config:DEFAULT_MOE_PADDING_SIZE",
            "sglang.srt.utils.common:parse_lscpu_topology",
            f"{_GRAMMAR}:_allocate_token_bitmask",
            f"{_GRAMMAR}:XGrammarGrammar.apply_vocab_mask",
            "sglang.srt.layers.logits_processor:fused_softcap",
            "sglang.srt.models.qwen2_moe:fused_gate_sigmoid_mul_add",
        ),
    ),
    Patch(
        name="cpu_ranks",
        why="SGLang requires NCCL, a NUMA node and an accelerator for each rank of an engine",
        module="patches.cpu_ranks",
        device="cpu",
        several_ranks=True,
        wraps=(
            "sglang.srt.distributed.parallel_state:init_model_parallel_group",
            f"{_DISPATCH}:get_device",
            "sglang.srt.layers.moe.fused_moe_native:moe_forward_native",
        ),
        reads=(
            f"{_DISPATCH}:StandardDispatcher.dispatch",
            "sglang.srt.utils.numa_utils:init_threads_binding",
        ),
    ),
    Patch(
        name="cpu_lora",
        why="SGLang's adapters allocate pinned memory on a CPU, which needs a CUDA driver",
        module="patches.cpu_lora",
        device="cpu",
        argument="enable_lora",
        wraps=(
            f"{_LORA}.lora_manager:LoRAManager.init_state",
            f"{_LORA}.backend.torch_backend:TorchNativeLoRABackend.prepare_lora_batch",
        ),
    ),
    Patch(
        name="cpu_attention",
        why="SGLang attends for one request after the other on a CPU, in Python, in every layer",
        module="accelerations.cpu_attention",
        acceleration=True,
        exact=False,
        device="cpu",
        wraps=("sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS",),
        reads=("sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend",),
    ),
    Patch(
        name="gpu_sampling",
        why="SGLang reads all logits a dozen times to sample",
        module="accelerations.gpu_sampling",
        acceleration=True,
        exact=False,
        device="cuda",
        wraps=(f"{_SAMPLER}.forward",),
        reads=(
            f"{_SAMPLER}._preprocess_logits",
            f"{_SAMPLER}._sample_from_probs",
            f"{_SAMPLER}._sync_token_ids_across_tp",
            "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs",
        ),
    ),
    Patch(
        name="seeded_sampling",
        why="SGLang has seeds only in its deterministic mode, where all other requests share one",
        module="patches.seeded_sampling",
        wraps=(
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.from_schedule_batch",
            f"{_SAMPLER}._sample_from_logprobs",
            f"{_SAMPLER}._sample_from_probs",
        ),
    ),
    Patch(
        name="sampling_reports",
        why="SGLang has one kind of logprobs, and sampling masks only with top-k and without seeds",
        module="patches.sampling_reports",
        after=("gpu_sampling", "seeded_sampling"),
        wraps=(
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.apply_logits_bias",
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.copy_for_forward",
            f"{_SAMPLER}.forward",
            f"{_SAMPLER}._sample_from_probs",
        ),
        reads=(
            f"{_RUNNER}._preprocess_logits",
            "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs",
        ),
    ),
    Patch(
        name="score_temperature",
        why="SGLang scores given tokens at temperature 1 only",
        module="patches.score_temperature",
        wraps=("sglang.srt.layers.logprob_processor:InputLogprobProcessor.forward",),
        reads=("sglang.srt.layers.logprob_processor:InputLogprobProcessor._forward_by_chunk",),
    ),
    Patch(
        name="routed_experts",
        why="SGLang returns routed experts of a second prefill, and pins memory on a CPU",
        module="patches.routed_experts",
        argument="enable_return_routed_experts",
        wraps=(
            f"{_CAPTURE}.base:BaseHostCache",
            f"{_CAPTURE}.base:BaseTopkCapturer.on_forward_end",
            f"{_CAPTURE}.routed_experts:RoutedExpertsCapturer.create",
        ),
        reads=(
            f"{_CAPTURE}.base:BaseTopkCapturer.get_topk",
            f"{_CAPTURE}.base:TopkCaptureOutput",
            f"{_CAPTURE}.routed_experts:RoutedExpertsCapturer.__init__",
            f"{_CAPTURE}.routed_experts:RoutedExpertsCapturer._get_local_slice",
            f"{_CAPTURE}.routed_experts:get_global_experts_capturer",
            f"{_RESULTS}._maybe_collect_routed_experts",
        ),
    ),
    Patch(
        name="logit_processors",
        why="SGLang unpickles processors, runs them a token late, and ends if one of them fails",
        module="patches.logit_processors",
        argument="enable_custom_logit_processor",
        wraps=(
            f"{_SAMPLING}.custom_logit_processor:CustomLogitProcessor.from_str",
            f"{_FORWARD_BATCH}.init_new",
        ),
        reads=(
            f"{_BATCH}:Req.__init__",
            f"{_MANAGERS}.tp_worker:TpModelWorker.forward_batch_generation",
            f"{_SCHEDULER}.launch_batch_sample_if_needed",
            f"{_SAMPLER}._preprocess_logits",
            "sglang.srt.layers.sampler:apply_custom_logit_processor",
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask",
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.merge_batch",
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.filter_batch",
        ),
    ),
    Patch(
        name="undrawable_tokens",
        why="a request without a drawable token (NaN, a dead end of its grammar) ends all others",
        module="patches.undrawable_tokens",
        after=("gpu_sampling", "seeded_sampling", "sampling_reports"),
        wraps=(f"{_SAMPLER}.forward", f"{_SAMPLER}._sample_from_probs"),
    ),
    Patch(
        name="end_of_output",
        why="an end of sequence as the last allowed token is reported as 'length', and "
        "min_new_tokens does not hold against stop strings",
        module="patches.end_of_output",
        wraps=(
            f"{_BATCH}:Req.update_finish_state",
            f"{_BATCH}:Req._check_token_based_finish",
            f"{_BATCH}:Req._check_str_based_finish",
        ),
    ),
    Patch(
        name="stop_regex",
        why="a stop expression that backtracks holds up all requests of the worker",
        module="patches.stop_regex",
        single_rank=True,
        wraps=(f"{_BATCH}:re",),
        reads=(f"{_BATCH}:Req._check_str_based_finish",),
    ),
    Patch(
        name="penalties",
        why="penalties of continued and retracted requests start anew, or count a token twice",
        module="patches.penalties",
        after=("seeded_sampling",),
        wraps=(
            f"{_SAMPLING}.sampling_batch_info:SamplingBatchInfo.from_schedule_batch",
            f"{_BATCH}:ScheduleBatch.cumulate_penalty_output_tokens",
        ),
        reads=(
            f"{_SAMPLING}.penaltylib.orchestrator:BatchedPenalizerOrchestrator",
            f"{_SAMPLING}.penaltylib.frequency_penalty:BatchedFrequencyPenalizer",
            f"{_SAMPLING}.penaltylib.min_new_tokens:BatchedMinNewTokensPenalizer",
            f"{_SAMPLING}.penaltylib.presence_penalty:BatchedPresencePenalizer",
            f"{_SAMPLING}.penaltylib.repetition_penalty:BatchedRepetitionPenalizer",
        ),
    ),
    Patch(
        name="parameter_arena",
        why="new weights are copied into place while the engine stands still",
        module="accelerations.parameter_arena",
        acceleration=True,
        wraps=(f"{_RUNNER}.load_model",),
    ),
    Patch(
        name="scheduler",
        why="requests come from sockets of SGLang's own server, and outputs go there",
        module=None,
        wraps=(
            f"{_SCHEDULER}.init_ipc_channels",
            f"{_SCHEDULER}.init_tokenizer",
            f"{_SCHEDULER}.init_idle_sleeper",
            f"{_SCHEDULER}.init_request_receiver",
            f"{_SCHEDULER}.maybe_sleep_on_idle",
            f"{_SCHEDULER}.process_input_requests",
            f"{_SCHEDULER}.abort_request",
            f"{_SCHEDULER}.init_req_max_new_tokens",
            f"{_SCHEDULER}._add_request_to_queue",
            f"{_SCHEDULER}.run_batch",
            f"{_SCHEDULER}.process_batch_result",
            f"{_COMPONENTS}.request_receiver:SchedulerRequestReceiver._pull_raw_reqs",
        ),
        reads=(
            f"{_SCHEDULER}.event_loop_normal",
            f"{_SCHEDULER}.event_loop_overlap",
            f"{_SCHEDULER}.pause_generation",
            f"{_COMPONENTS}.ipc_channels:SchedulerIpcChannels",
        ),
    ),
    Patch(
        name="lora",
        why="SGLang cannot replace an adapter while requests use it",
        module="lora",
        argument="enable_lora",
        wraps=(),
        reads=(
            f"{_BATCH}:Req.__init__",
            f"{_LORA}.lora:LoRAAdapter.__init__",
            f"{_LORA}.lora:LoRAAdapter.initialize_weights_from_tensors",
            f"{_LORA}.lora:LoRAAdapter._process_weight",
            f"{_LORA}.lora:LoRAAdapter._normalize_weights",
            f"{_LORA}.lora:LoRAAdapter.normalize_qkv_proj",
            f"{_LORA}.lora:LoRAAdapter.normalize_gate_up_proj",
            f"{_LORA}.lora_config:LoRAConfig",
            f"{_LORA}.lora_manager:LoRAManager.fetch_new_loras",
            f"{_LORA}.lora_manager:LoRAManager.prepare_lora_batch",
            f"{_LORA}.lora_manager:LoRAManager._unload_lora_adapter",
            f"{_LORA}.mem_pool:LoRAMemoryPool.load_lora_weight_to_buffer",
        ),
    ),
    Patch(
        name="shared_prefix",
        why="requests that begin alike each prefill their common prefix",
        module="accelerations.shared_prefix",
        acceleration=True,
        wraps=(f"{_SCHEDULER}.get_new_batch_prefill",),
    ),
    Patch(
        name="decode_results",
        why="SGLang makes a dozen calls for each request that merely continues",
        module="accelerations.decode_results",
        acceleration=True,
        wraps=(f"{_RESULTS}.process_batch_result_decode",),
        reads=(
            f"{_RESULTS}._normalize_decode_outputs",
            f"{_RESULTS}._handle_finish_state_updated_req",
            f"{_RESULTS}._maybe_update_reasoning_tokens",
            f"{_RESULTS}._apply_decode_logprobs",
            f"{_BATCH}:Req.update_finish_state",
            f"{_BATCH}:Req._check_vocab_boundary_finish",
            f"{_BATCH}:Req._check_str_based_finish",
            f"{_BATCH}:Req._check_token_based_finish",
            f"{_STREAMER}:SchedulerOutputStreamer._stream_output_generation",
            f"{_STREAMER}:_GenerationStreamAccumulator.accept",
        ),
    ),
    Patch(
        name="short_prefill",
        why="SGLang launches a prefill of a few tokens kernel by kernel, without a CUDA graph",
        module="accelerations.short_prefill",
        acceleration=True,
        exact=False,
        wraps=(f"{_RUNNER}.forward",),
        reads=(_FORWARD_BATCH,),
    ),
    Patch(
        name="queries",
        why="a next-token query with a cached prompt goes through all of SGLang's scheduling",
        module="accelerations.queries",
        acceleration=True,
        exact=False,
        wraps=(),
        reads=(
            _FORWARD_BATCH,
            f"{_CACHE}.memory_pool:ReqToTokenPool",
            f"{_CACHE}.radix_cache:RadixCache.match_prefix",
            f"{_CACHE}.radix_cache:RadixCache._insert_helper",
            f"{_CACHE}.allocator.token:TokenToKVPoolAllocator",
        ),
    ),
    Patch(
        name="next_token_logprobs",
        why="SGLang returns the logprobs of a whole vocabulary as Python lists",
        module="next_token",
        after=("short_prefill",),
        wraps=(f"{_RUNNER}.forward",),
    ),
)
"""All patches. If two patches wrap the same code, the later patch wraps the earlier one."""

ACCELERATIONS: Final = tuple(patch.name for patch in PATCHES if patch.acceleration)
