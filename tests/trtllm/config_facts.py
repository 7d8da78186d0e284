"""What section B of docs/features.md says of the configurations: see tests/trtllm/facts.py."""

from __future__ import annotations

from typing import Any

from compat import trtllm
from compat.trtllm import bindings
from tests.trtllm.facts import NONE, TABLE, Facts

EXECUTOR = {
    "max_beam_width": 2,
    "scheduler_config": trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION),
    "kv_cache_config": trtllm.KvCacheConfig(False, 42),
    "enable_chunked_context": True,
    "normalize_log_probs": False,
    "iter_stats_max_iterations": 100,
    "request_stats_max_iterations": 10,
    "batching_type": trtllm.BatchingType.STATIC,
    "max_batch_size": 8,
    "max_num_tokens": 128,
    "parallel_config": trtllm.ParallelConfig(),
    "peft_cache_config": trtllm.PeftCacheConfig(10),
    "logits_post_processor_config": trtllm.LogitsPostProcessorConfig(),
    "decoding_config": trtllm.DecodingConfig(trtllm.DecodingMode.TopKTopP()),
    "use_gpu_direct_storage": True,
    "gpu_weights_percent": 0.5,
    "max_queue_size": 3,
    "extended_runtime_perf_knob_config": trtllm.ExtendedRuntimePerfKnobConfig(False, True),
    "debug_config": trtllm.DebugConfig(True, True, ["test"]),
    "recv_poll_period_ms": 50,
    "max_seq_idle_microseconds": 240_000_000,
    "spec_dec_config": trtllm.SpeculativeDecodingConfig(True),
    "guided_decoding_config": trtllm.GuidedDecodingConfig(
        trtllm.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR, ["eos", "a"]
    ),
    "additional_model_outputs": [trtllm.AdditionalModelOutput("topKLogits")],
    "cache_transceiver_config": trtllm.CacheTransceiverConfig(max_tokens_in_buffer=1024),
    "gather_generation_logits": True,
    "mm_embedding_offloading": True,
    "enable_trt_overlap": True,
    "fail_fast_on_attention_window_too_large": True,
}
EXECUTOR_DEFAULTS = dict.fromkeys(EXECUTOR) | {
    "max_beam_width": 1,
    "scheduler_config": trtllm.SchedulerConfig(),
    "kv_cache_config": trtllm.KvCacheConfig(),
    "enable_chunked_context": False,
    "normalize_log_probs": True,
    "iter_stats_max_iterations": 1000,
    "request_stats_max_iterations": 0,
    "batching_type": trtllm.BatchingType.INFLIGHT,
    "peft_cache_config": trtllm.PeftCacheConfig(),
    "use_gpu_direct_storage": False,
    "gpu_weights_percent": 1.0,
    "extended_runtime_perf_knob_config": trtllm.ExtendedRuntimePerfKnobConfig(),
    "recv_poll_period_ms": 0,
    "max_seq_idle_microseconds": 180_000_000,
    "gather_generation_logits": False,
    "mm_embedding_offloading": False,
    "enable_trt_overlap": False,
    "fail_fast_on_attention_window_too_large": False,
}
KV_CACHE = {
    "enable_block_reuse": False,
    "max_tokens": 3,
    "max_attention_window": [10],
    "sink_token_length": 2,
    "free_gpu_memory_fraction": 0.5,
    "host_cache_size": 1024,
    "onboard_blocks": False,
    "cross_kv_cache_fraction": 0.5,
    "secondary_offload_min_priority": 50,
    "event_buffer_max_size": 1024,
    "enable_partial_reuse": False,
    "copy_on_partial_reuse": False,
    "use_uvm": True,
    "attention_dp_events_gather_period_ms": 6,
    "max_gpu_total_bytes": 7,
}
KV_CACHE_DEFAULTS = dict.fromkeys(KV_CACHE) | {
    "enable_block_reuse": True,
    "onboard_blocks": True,
    "event_buffer_max_size": 0,
    "enable_partial_reuse": True,
    "copy_on_partial_reuse": True,
    "use_uvm": False,
    "attention_dp_events_gather_period_ms": 5,
    "max_gpu_total_bytes": 0,
}
PEFT_DEFAULTS = {
    "num_host_module_layer": 0,
    "num_device_module_layer": 0,
    "optimal_adapter_size": 8,
    "max_adapter_size": 64,
    "num_put_workers": 1,
    "num_ensure_workers": 1,
    "num_copy_streams": 1,
    "max_pages_per_block_host": 24,
    "max_pages_per_block_device": 8,
    "device_cache_percent": NONE,
    "host_cache_size": NONE,
    "lora_prefetch_dir": NONE,
}
PEFT = {name: i + 1 for i, name in enumerate(PEFT_DEFAULTS)} | {"device_cache_percent": 0.5, "lora_prefetch_dir": "x"}
OPTIONAL_PARAMS: dict[str, Any] = {
    "kv_cache_config": bindings.KvCacheConfig(10, [10], 0, 0.5, True),
    "enable_trt_overlap": True,
    "device_ids": [0, 1],
    "normalize_log_probs": False,
    "enable_chunked_context": True,
    "max_beam_width": 2,
    "scheduler_config": trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION),
}

CONFIGS = [
    Facts(trtllm.ExecutorConfig, EXECUTOR, EXECUTOR_DEFAULTS, len(EXECUTOR), dynamic=True),
    Facts(trtllm.KvCacheConfig, KV_CACHE, KV_CACHE_DEFAULTS, 10, dynamic=True),
    Facts(
        trtllm.RuntimeDefaults,
        {"max_attention_window": [1, 2], "sink_token_length": 4},
        {"max_attention_window": NONE, "sink_token_length": NONE},
        2,
        read_only=True,
    ),
    Facts(
        trtllm.SchedulerConfig,
        {
            "capacity_scheduler_policy": trtllm.CapacitySchedulerPolicy.STATIC_BATCH,
            "context_chunking_policy": trtllm.ContextChunkingPolicy.EQUAL_PROGRESS,
            "dynamic_batch_config": trtllm.DynamicBatchConfig(True, False, 128),
        },
        {
            "capacity_scheduler_policy": trtllm.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
            "context_chunking_policy": NONE,
            "dynamic_batch_config": NONE,
        },
        3,
        read_only=True,
    ),
    Facts(
        trtllm.DynamicBatchConfig,
        {
            "enable_batch_size_tuning": True,
            "enable_max_num_tokens_tuning": True,
            "dynamic_batch_moving_average_window": 128,
        },
        {},
        3,
        num_required=3,
        read_only=True,
    ),
    Facts(trtllm.PeftCacheConfig, PEFT, PEFT_DEFAULTS, len(PEFT), read_only=True),
    Facts(
        trtllm.LogitsPostProcessorConfig,
        {"processor_map": {"mine": print}, "processor_batched": len, "replicate": False},
        {"processor_map": NONE, "processor_batched": NONE, "replicate": True},
        3,
    ),
    Facts(
        trtllm.GuidedDecodingConfig,
        {
            "backend": trtllm.GuidedDecodingConfig.GuidedDecodingBackend.LLGUIDANCE,
            "encoded_vocab": ["eos", "a"],
            "tokenizer_str": "{}",
            "stop_token_ids": [0],
        },
        {"encoded_vocab": NONE, "tokenizer_str": NONE, "stop_token_ids": NONE},
        4,
        num_required=1,
    ),
    Facts(
        trtllm.DecodingConfig,
        {"decoding_mode": trtllm.DecodingMode.Medusa(), "lookahead_decoding_config": NONE, "medusa_choices": [[0, 0]]},
        {"decoding_mode": NONE, "lookahead_decoding_config": NONE, "medusa_choices": NONE, "eagle_config": NONE},
        3,
    ),
    Facts(
        trtllm.ParallelConfig,
        {
            "communication_type": trtllm.CommunicationType.MPI,
            "communication_mode": trtllm.CommunicationMode.ORCHESTRATOR,
            "device_ids": [0, 1],
            "participant_ids": [4, 5],
            "orchestrator_config": trtllm.OrchestratorConfig(True, "worker"),
            "num_nodes": 2,
        },
        {
            "communication_type": trtllm.CommunicationType.MPI,
            "communication_mode": trtllm.CommunicationMode.LEADER,
            "device_ids": NONE,
            "participant_ids": NONE,
            "orchestrator_config": NONE,
            "num_nodes": NONE,
        },
        6,
    ),
    Facts(
        trtllm.OrchestratorConfig,
        {
            "is_orchestrator": False,
            "worker_executable_path": "worker",
            "orch_leader_comm": "comm",
            "spawn_processes": False,
        },
        {
            "is_orchestrator": True,
            "worker_executable_path": "",
            "orch_leader_comm": NONE,
            "spawn_processes": True,
        },
        4,
    ),
    Facts(
        trtllm.DebugConfig,
        {
            "debug_input_tensors": True,
            "debug_output_tensors": True,
            "debug_tensor_names": ["test"],
            "debug_tensors_max_iterations": 3,
        },
        {"debug_input_tensors": False, "debug_output_tensors": False, "debug_tensor_names": []},
        4,
    ),
    Facts(
        trtllm.ExtendedRuntimePerfKnobConfig,
        {
            "multi_block_mode": False,
            "enable_context_fmha_fp32_acc": True,
            "cuda_graph_mode": True,
            "cuda_graph_cache_size": 2,
        },
        {"multi_block_mode": True, "enable_context_fmha_fp32_acc": False},
        4,
    ),
    Facts(trtllm.SpeculativeDecodingConfig, {"fast_logits": True}, {"fast_logits": False}, 1),
    Facts(
        trtllm.CacheTransceiverConfig,
        {"backend": "DEFAULT", "max_tokens_in_buffer": 1024, "kv_transfer_timeout_ms": 5},
        {"backend": NONE, "max_tokens_in_buffer": NONE, "kv_transfer_timeout_ms": NONE},
        3,
    ),
]

GPT_MANAGER = [
    Facts(
        bindings.KvCacheConfig,
        {
            "max_tokens": 10,
            "max_attention_window": [10],
            "sink_token_length": 4,
            "free_gpu_memory_fraction": 0.5,
            "enable_block_reuse": True,
        },
        {
            "max_tokens": NONE,
            "max_attention_window": NONE,
            "sink_token_length": NONE,
            "free_gpu_memory_fraction": NONE,
            "enable_block_reuse": False,
        },
        5,
    ),
    Facts(
        bindings.TrtGptModelOptionalParams,
        OPTIONAL_PARAMS,
        {
            "kv_cache_config": bindings.KvCacheConfig(),
            "enable_trt_overlap": False,
            "device_ids": NONE,
            "enable_chunked_context": False,
            "max_beam_width": 1,
            "scheduler_config": trtllm.SchedulerConfig(),
        },
        5,
        dynamic=True,
    ),
    Facts(bindings.NamedTensor, {"name": "output_ids", "tensor": TABLE}, {}, 2, num_required=2, read_only=True),
    Facts(
        bindings.PeftCacheManagerConfig,
        {"num_host_module_layer": 1},
        {"max_pages_per_block_device": 24, "device_cache_percent": 0.05, "host_cache_size": 1 << 30},
        1,
        read_only=True,
    ),
]
