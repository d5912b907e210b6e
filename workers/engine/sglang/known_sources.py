"""Digests of the SGLang source that our patches were compared with (see ``source.digest``)."""

from __future__ import annotations

from typing import Final

KNOWN: Final[dict[str, dict[str, str]]] = {
    "sglang.srt.configs.update_config:DEFAULT_MOE_PADDING_SIZE": {
        "d145d3a2c41e35a9": "0.5.17 to 0.5.23",
    },
    "sglang.srt.constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask": {
        "59743e0a87a1cf57": "0.5.17",
        "0b958f4ee47ff528": "0.5.18 to 0.5.23",
    },
    "sglang.srt.constrained.xgrammar_backend:_allocate_token_bitmask": {
        "81fb7f0147c62f5c": "0.5.17",
        "13e33bd5819e63c9": "0.5.18 to 0.5.23",
    },
    "sglang.srt.distributed.parallel_state:init_model_parallel_group": {
        "7693f403fc583f0d": "0.5.17 to 0.5.20",
        "0228ded50d198d37": "0.5.21 to 0.5.22",
        "cf0355669ac6af65": "0.5.23",
    },
    "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS": {
        "776476858af0d387": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend": {
        "c681bb928dd710ad": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.logits_processor:fused_softcap": {
        "9416c684105e82e8": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.logprob_processor:InputLogprobProcessor._forward_by_chunk": {
        "c58b4dae103f9dde": "0.5.17",
        "9637f67c67a3cb93": "0.5.18 to 0.5.19",
        "34264dfb364fc41b": "0.5.20",
        "b0f22db5364217af": "0.5.21 to 0.5.23",
    },
    "sglang.srt.layers.logprob_processor:InputLogprobProcessor.forward": {
        "3388a79950a886a9": "0.5.17 to 0.5.20",
        "a80fb7d8576bb7b2": "0.5.21 to 0.5.23",
    },
    "sglang.srt.layers.logprob_processor:OutputLogprobProcessor.compute_logprobs": {
        "4ec49f40acc4858b": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.moe.fused_moe_native:moe_forward_native": {
        "e94e6fac5846d0a0": "0.5.17 to 0.5.19",
        "53b7e13072dbf344": "0.5.20 to 0.5.23",
    },
    "sglang.srt.layers.moe.token_dispatcher.standard:StandardDispatcher.dispatch": {
        "775ab65a64ac2424": "0.5.17 to 0.5.19",
        "df5e766edd5c8d1f": "0.5.20",
        "0feeaea0b6ff69b0": "0.5.21 to 0.5.22",
        "bed3b6e6d436d742": "0.5.23",
    },
    "sglang.srt.layers.moe.token_dispatcher.standard:get_device": {
        "b4a511fbfa36e112": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.rotary_embedding.base:_is_cpu": {
        "4c2ddd089566c2ad": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.sampler:Sampler._preprocess_logits": {
        "510aab35bf494675": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.sampler:Sampler._sample_from_logprobs": {
        "e1a53249c6f797e7": "0.5.17 to 0.5.19",
        "f3083f04544fd076": "0.5.20 to 0.5.23",
    },
    "sglang.srt.layers.sampler:Sampler._sample_from_probs": {
        "bc7514cbd8e4d0b9": "0.5.17 to 0.5.19",
        "9525a82794c9fe39": "0.5.20",
        "465d32a7de619c07": "0.5.21",
        "c90023f0fa9c16c7": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.sampler:Sampler._sync_token_ids_across_tp": {
        "5f790b66cab4a752": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.sampler:Sampler.forward": {
        "efec3bc4f1ae1224": "0.5.17",
        "af689764b4b1af97": "0.5.18",
        "7638b67023963bc9": "0.5.19",
        "e6b0794a0d434102": "0.5.20",
        "cda5191757d6cc99": "0.5.21",
        "f8d795ab811a6961": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.sampler:apply_custom_logit_processor": {
        "1f253b8ce97057b6": "0.5.17 to 0.5.19",
        "d8588b8481f82493": "0.5.20",
        "76e955f650478a3d": "0.5.21 to 0.5.23",
    },
    "sglang.srt.lora.backend.torch_backend:TorchNativeLoRABackend.prepare_lora_batch": {
        "6ce4c7cf28ff102d": "0.5.17 to 0.5.19",
        "6edc13176598b063": "0.5.20 to 0.5.23",
    },
    "sglang.srt.lora.lora:LoRAAdapter.__init__": {
        "310e8ff8befc40c6": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora:LoRAAdapter._normalize_weights": {
        "b1257df57d6bc5c0": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora:LoRAAdapter._process_weight": {
        "14e753f404759201": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora:LoRAAdapter.initialize_weights_from_tensors": {
        "245971b419fe1a79": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora:LoRAAdapter.normalize_gate_up_proj": {
        "b701b78183af2400": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora:LoRAAdapter.normalize_qkv_proj": {
        "45b1db446e17cc4f": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora_config:LoRAConfig": {
        "9700e1c8f50c943e": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora_manager:LoRAManager._unload_lora_adapter": {
        "6fa085cdb0dbd410": "0.5.17 to 0.5.19",
        "19c5b9a91d1b545b": "0.5.20",
        "0f282464679df952": "0.5.21 to 0.5.23",
    },
    "sglang.srt.lora.lora_manager:LoRAManager.fetch_new_loras": {
        "9b4202df6f2cecbf": "0.5.17 to 0.5.23",
    },
    "sglang.srt.lora.lora_manager:LoRAManager.init_state": {
        "3b66a59fe47a315f": "0.5.17 to 0.5.19",
        "ffb2fb4353820d0c": "0.5.20 to 0.5.22",
        "2127bd8106c1d3d6": "0.5.23",
    },
    "sglang.srt.lora.lora_manager:LoRAManager.prepare_lora_batch": {
        "5af804fa45681e0f": "0.5.17 to 0.5.19",
        "0cea5df4d5cd90b1": "0.5.20",
        "2d4ba70034864a37": "0.5.21",
        "77b83ca19cee412a": "0.5.22",
        "75d832c03b74846a": "0.5.23",
    },
    "sglang.srt.lora.mem_pool:LoRAMemoryPool.load_lora_weight_to_buffer": {
        "15991929d901410c": "0.5.17 to 0.5.19",
        "2c0a7396019ab6bf": "0.5.20",
        "00085fd17b54d1bb": "0.5.21 to 0.5.22",
        "3f432383c0dbb3e5": "0.5.23",
    },
    "sglang.srt.managers.schedule_batch:Req.__init__": {
        "e704b6ed9f432d69": "0.5.17",
        "e61361b964c2168d": "0.5.18",
        "9906b8b79fa1f297": "0.5.19",
        "0618c82abc6a2bd8": "0.5.20",
        "898119480c4cbb8b": "0.5.21",
        "18295f9863c49e5b": "0.5.22",
        "95516b226df11e45": "0.5.23",
    },
    "sglang.srt.managers.schedule_batch:Req._check_str_based_finish": {
        "bba588eb60564a2f": "0.5.17 to 0.5.22",
        "b155e3b7eee11b5a": "0.5.23",
    },
    "sglang.srt.managers.schedule_batch:Req._check_token_based_finish": {
        "619a1b24f8e41bea": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.schedule_batch:Req._check_vocab_boundary_finish": {
        "4e669bd0a9dc49c7": "0.5.17",
        "d37bde4e10ae3442": "0.5.18 to 0.5.23",
    },
    "sglang.srt.managers.schedule_batch:Req.update_finish_state": {
        "470076e58287e7d4": "0.5.17",
        "e351e67cbe30acac": "0.5.18 to 0.5.23",
    },
    "sglang.srt.managers.schedule_batch:ScheduleBatch.cumulate_penalty_output_tokens": {
        "dce2467c859a7049": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.schedule_batch:re": {
        "a830333312c4c9c2": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler._add_request_to_queue": {
        "075bf4dbc714af28": "0.5.17 to 0.5.19",
        "1de9ccc7bb0f1e93": "0.5.20",
        "f75b6a4d5c52de08": "0.5.21",
        "056a60799b02ac47": "0.5.22 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.abort_request": {
        "7e21b552f84913db": "0.5.17",
        "3cf53e2304063f08": "0.5.18",
        "2c5f1872cbb4da0e": "0.5.19",
        "988ba7243daddada": "0.5.20",
        "383f93e16c9dcd4c": "0.5.21",
        "f99696f79922b8e7": "0.5.22",
        "b16ca1103b1df7f5": "0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.event_loop_normal": {
        "1bb8fae5cf58c6e5": "0.5.17",
        "cd44aa7f9abcb956": "0.5.18 to 0.5.19",
        "c328a45b821f18a0": "0.5.20 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.event_loop_overlap": {
        "ccfc721a7ae85414": "0.5.17",
        "a8cd52911efc31ec": "0.5.18 to 0.5.19",
        "e7be4bafe7d00315": "0.5.20 to 0.5.21",
        "c093eb14e50c1ac6": "0.5.22 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.get_new_batch_prefill": {
        "e6c7c21ed672ee15": "0.5.17",
        "a8b9a7a4fee3e50e": "0.5.18 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.init_idle_sleeper": {
        "58462e678345b5f9": "0.5.17 to 0.5.20",
        "72a00ab5ce7a3484": "0.5.21 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.init_ipc_channels": {
        "750d68fbc579e4be": "0.5.17",
        "bda982e32f29c004": "0.5.18 to 0.5.20",
        "f53a7954b45e071d": "0.5.21",
        "8dee5ea23751f232": "0.5.22 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.init_req_max_new_tokens": {
        "accf4e812960b2f1": "0.5.17",
        "53e81c47d0674b8a": "0.5.18 to 0.5.20",
        "ea5d8cf1e6bf45ac": "0.5.21 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.init_request_receiver": {
        "cb815a4d3a43b2c8": "0.5.17 to 0.5.19",
        "8fc75764873c881f": "0.5.20",
        "d2747bad8c83ec0d": "0.5.21",
        "d42058fb7d72cdec": "0.5.22 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.init_tokenizer": {
        "0f521d71665e93c3": "0.5.17",
        "346751ab6c4a1351": "0.5.18",
        "9bb12b50c0d9f15a": "0.5.19",
        "a6506db69f70860c": "0.5.20",
        "4856a8c8c76b480f": "0.5.21 to 0.5.22",
        "60eb2f65355c8bcd": "0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.launch_batch_sample_if_needed": {
        "8014a5735ac36e57": "0.5.17",
        "81cf149dbe8561d1": "0.5.18",
        "f21e8cf040c2b900": "0.5.19 to 0.5.22",
        "f0fedb07f643f6e7": "0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.maybe_sleep_on_idle": {
        "3c39e1fe8220ea3b": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.pause_generation": {
        "d3c14a7df269b51a": "0.5.17 to 0.5.18",
        "96262708fe901269": "0.5.19 to 0.5.20",
        "65a222c93f327f8f": "0.5.21",
        "8af930328a22c17b": "0.5.22",
        "b5afa4cbaf6fbea9": "0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.process_batch_result": {
        "2b92e6cdbfb76213": "0.5.17",
        "4a7ae3839f5ec614": "0.5.18",
        "9f7d9347f12248ff": "0.5.19",
        "b2eadbb3d3170710": "0.5.20",
        "726305f46a979a47": "0.5.21 to 0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.process_input_requests": {
        "b28e433d094f0413": "0.5.17",
        "f33092b92762a9ab": "0.5.18",
        "379fe30736dbc97b": "0.5.19",
        "aafb6e16157cf380": "0.5.20",
        "285e51e5e8af0cd5": "0.5.21",
        "c6961cbdd5355c96": "0.5.22",
        "b8c3ef031ea741a8": "0.5.23",
    },
    "sglang.srt.managers.scheduler:Scheduler.run_batch": {
        "af728442e936b53c": "0.5.17",
        "9f6338ab4b5cc3d8": "0.5.18",
        "2a00c5a8a9829f81": "0.5.19",
        "e81d7476d643abe9": "0.5.20",
        "8c6ed80ef5c4aad7": "0.5.21",
        "8bfc6d00f35c796c": "0.5.22",
        "4e9bb4d5e649e2f1": "0.5.23",
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._apply_decode_logprobs": {
        "1bfeaa5ba10393dc": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._handle_finish_state_updated_req": {
        "04297759b14d2fdd": "0.5.17",
        "b22495dbb10d38f4": "0.5.23",
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._maybe_collect_routed_experts": {
        "d5129896884dfd79": "0.5.17 to 0.5.18",
        "0a42f229acf94e72": "0.5.19 to 0.5.23",
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._maybe_update_reasoning_tokens": {
        "633130f54d2eda5e": "0.5.17 to 0.5.19",
        "8ddb48fd1208a1ca": "0.5.23",
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor._normalize_decode_outputs": {
        "34d5590a3950a004": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor.process_batch_result_decode": {
        "f9da1ca362ae81e4": "0.5.17 to 0.5.18",
        "c4c08ab3f8690085": "0.5.22 to 0.5.23",
    },
    "sglang.srt.managers.scheduler_components.ipc_channels:SchedulerIpcChannels": {
        "427dc679ef2a1692": "0.5.17 to 0.5.23",
    },
    "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer._stream_output_generation": {
        "4b7f7afb740ae4eb": "0.5.17 to 0.5.18",
        "830e84a497de644a": "0.5.23",
    },
    "sglang.srt.managers.scheduler_components.output_streamer:_GenerationStreamAccumulator.accept": {
        "1f50943c70c2b1e4": "0.5.17 to 0.5.18",
        "8137d1ccc48792a7": "0.5.23",
    },
    "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver._pull_raw_reqs": {
        "863950264cc8b694": "0.5.17 to 0.5.20",
        "120561e47aafb375": "0.5.21",
        "0af9fb996bb0049a": "0.5.22 to 0.5.23",
    },
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation": {
        "ae932f5504d2a394": "0.5.17",
        "170f4c3bbc55616f": "0.5.18",
        "dfed58cf1048cdd7": "0.5.19",
        "773a89f468538049": "0.5.20",
        "7cced6d603063743": "0.5.21",
        "9a52707cc52055a3": "0.5.22",
        "074f2a1c07948223": "0.5.23",
    },
    "sglang.srt.mem_cache.allocator.token:TokenToKVPoolAllocator": {
        "237dacf0b760c1af": "0.5.17",
        "30f7749be9f15726": "0.5.20 to 0.5.23",
    },
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool": {
        "c865c72c57a5b70f": "0.5.17",
        "8cb7eb3124eba8bb": "0.5.22 to 0.5.23",
    },
    "sglang.srt.mem_cache.radix_cache:RadixCache._insert_helper": {
        "db59655b9a5cdfc8": "0.5.17 to 0.5.18",
        "6f65095a47591ef2": "0.5.22 to 0.5.23",
    },
    "sglang.srt.mem_cache.radix_cache:RadixCache.match_prefix": {
        "f429ce5e806363e8": "0.5.17 to 0.5.21",
        "00cc574a4e0b9d17": "0.5.22 to 0.5.23",
    },
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch": {
        "ee89c67ba03579b4": "0.5.17",
        "c18561de596fb762": "0.5.23",
    },
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new": {
        "c47ef29026e9130f": "0.5.17",
        "9a0c4387d3e0006f": "0.5.18",
        "d371f05cb690ec0a": "0.5.19",
        "e2dc59752e4be5b1": "0.5.20",
        "a7e61b4cbd9bf676": "0.5.21",
        "01b5d0ced0bda937": "0.5.22",
        "1f92fa245fced357": "0.5.23",
    },
    "sglang.srt.model_executor.model_runner:ModelRunner._preprocess_logits": {
        "7b6b74ce05eba5fa": "0.5.17 to 0.5.18",
        "26580ccf84f3f72a": "0.5.19 to 0.5.23",
    },
    "sglang.srt.model_executor.model_runner:ModelRunner.forward": {
        "110f3b02b09b0af2": "0.5.17 to 0.5.19",
        "d8bacbc3de115f37": "0.5.20",
        "cf3fdfee81e44740": "0.5.21",
        "cb4d5938882c6c8e": "0.5.22",
        "19034759e5d5ec51": "0.5.23",
    },
    "sglang.srt.model_executor.model_runner:ModelRunner.load_model": {
        "d2ba5b4a96505629": "0.5.17",
        "57f2c7113b2a6392": "0.5.18",
        "9f170facc655d726": "0.5.19",
        "29aad98bb856a971": "0.5.20",
        "5f22564729682789": "0.5.21",
        "d57a14935a44ccc1": "0.5.22",
        "bf6781e45efd63b5": "0.5.23",
    },
    "sglang.srt.models.qwen2_moe:fused_gate_sigmoid_mul_add": {
        "02715d78077099d0": "0.5.17 to 0.5.18",
        "42fd76a9ca3743c2": "0.5.19 to 0.5.23",
    },
    "sglang.srt.sampling.custom_logit_processor:CustomLogitProcessor.from_str": {
        "dbf2656ae3ec7cbc": "0.5.17 to 0.5.23",
    },
    "sglang.srt.sampling.penaltylib.frequency_penalty:BatchedFrequencyPenalizer": {
        "3dd8d86a453c3a78": "0.5.17 to 0.5.20",
        "13839176ad8e5384": "0.5.21 to 0.5.23",
    },
    "sglang.srt.sampling.penaltylib.min_new_tokens:BatchedMinNewTokensPenalizer": {
        "8d46995eca7765eb": "0.5.17 to 0.5.18",
        "6202edd4fc2ae489": "0.5.19",
        "705077465c811f6e": "0.5.20",
        "9da9a6ff27d9958e": "0.5.21 to 0.5.23",
    },
    "sglang.srt.sampling.penaltylib.orchestrator:BatchedPenalizerOrchestrator": {
        "5d00a984e5103133": "0.5.17 to 0.5.23",
    },
    "sglang.srt.sampling.penaltylib.presence_penalty:BatchedPresencePenalizer": {
        "5ee5aecc045fb2c3": "0.5.17 to 0.5.20",
        "4fdf236a59d17592": "0.5.21 to 0.5.23",
    },
    "sglang.srt.sampling.penaltylib.repetition_penalty:BatchedRepetitionPenalizer": {
        "7896b88bc3369b3a": "0.5.17 to 0.5.20",
        "de1b44de639a26b2": "0.5.21 to 0.5.23",
    },
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.apply_logits_bias": {
        "7ac1b7d4ffc47953": "0.5.17 to 0.5.18",
        "1e39687d59461a97": "0.5.19 to 0.5.23",
    },
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.copy_for_forward": {
        "a009750025c965f2": "0.5.17 to 0.5.23",
    },
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.filter_batch": {
        "ed20c017f5a96136": "0.5.17 to 0.5.19",
        "604ca077ac912a60": "0.5.20",
        "e5e3ba8a39286c11": "0.5.21",
        "a60d35b4a47552ee": "0.5.22 to 0.5.23",
    },
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch": {
        "04411a63bd78f5cd": "0.5.17",
        "3715714296f388a7": "0.5.18 to 0.5.19",
        "9bad4f4a9d3342f6": "0.5.20",
        "182967d8945861a1": "0.5.21",
        "48352e06affec043": "0.5.22 to 0.5.23",
    },
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.merge_batch": {
        "b832585100495086": "0.5.17 to 0.5.19",
        "b7752d909850f5a5": "0.5.20",
        "738fe168ce50c621": "0.5.21",
        "198d60abe8ea55e5": "0.5.22 to 0.5.23",
    },
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.update_regex_vocab_mask": {
        "2e03a7b8cf9993c9": "0.5.17 to 0.5.23",
    },
    "sglang.srt.state_capturer.base:BaseHostCache": {
        "734dae1a5084f1da": "0.5.17 to 0.5.19",
        "dcde3e30439b578d": "0.5.20 to 0.5.23",
    },
    "sglang.srt.state_capturer.base:BaseTopkCapturer.get_topk": {
        "b8c0ee25de027064": "0.5.17 to 0.5.23",
    },
    "sglang.srt.state_capturer.base:BaseTopkCapturer.on_forward_end": {
        "fd77ad70640d5781": "0.5.17",
        "91c7a85d21e49199": "0.5.18 to 0.5.20",
        "0a38d0e68ca93201": "0.5.21",
        "e289e633c1082b48": "0.5.22 to 0.5.23",
    },
    "sglang.srt.state_capturer.base:TopkCaptureOutput": {
        "3c54909c6ea6e963": "0.5.17 to 0.5.23",
    },
    "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer.__init__": {
        "957a611caa58a06a": "0.5.17 to 0.5.18",
        "5b505564668a5480": "0.5.19 to 0.5.21",
        "40d769cb2c2c22a1": "0.5.22 to 0.5.23",
    },
    "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer._get_local_slice": {
        "e86a933ecf458b73": "0.5.17 to 0.5.18",
        "3dbd8eea028e0e9e": "0.5.19 to 0.5.23",
    },
    "sglang.srt.state_capturer.routed_experts:RoutedExpertsCapturer.create": {
        "58c2839c3283fae2": "0.5.17",
        "e8848f42908e4ea5": "0.5.18 to 0.5.22",
        "fbb20d7e22035fb7": "0.5.23",
    },
    "sglang.srt.state_capturer.routed_experts:get_global_experts_capturer": {
        "b2fa062196a43c98": "0.5.17 to 0.5.18",
        "c50f678620f25ea3": "0.5.19 to 0.5.23",
    },
    "sglang.srt.utils.common:parse_lscpu_topology": {
        "6990bca3a48cf0e0": "0.5.17 to 0.5.23",
    },
    "sglang.srt.utils.numa_utils:init_threads_binding": {
        "65ce8574b7efee2a": "0.5.17 to 0.5.18",
        "90027a95f128629b": "0.5.19",
        "907397afc037cbed": "0.5.20 to 0.5.23",
    },
}
"""By definition: digests, each with the versions that have this source.

A message about an unknown source contains its digest. Before you add it, read what changed in
SGLang and run the tests that ``docs/sglang.md`` names.
"""
