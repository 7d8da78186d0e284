"""ExecutorConfig and its parts. Attributes can be set, but for those of SchedulerConfig, DynamicBatchConfig and PeftCacheConfig.

docs/parameters.md lists which of them the Executor honours, which have no effect, and which it refuses.
"""

from __future__ import annotations

from typing import Any

from compat.trtllm.decoding import DecodingConfig, GuidedDecodingConfig, LogitsPostProcessorConfig
from compat.trtllm.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
)
from compat.trtllm.kinds import (
    ANY,
    BOOL,
    COUNT,
    FLOAT,
    FRACTION,
    INT32,
    PATH,
    POSITIVE,
    STR,
    UINT32,
    UINT64,
    list_of,
    of,
    optional,
)
from compat.trtllm.record import Record, constant, copy_of, field
from compat.trtllm.request_configs import AdditionalModelOutput


class RuntimeDefaults(Record):
    """Attention settings that a model brings. Read-only."""

    max_attention_window: list[int] | None = constant(optional(list_of(INT32)), default=None)
    sink_token_length: int | None = constant(optional(INT32), default=None)


class KvCacheConfig(Record, dynamic=True):
    """Size and behaviour of the KV cache.

    `max_tokens`: of all sequences together. `max_attention_window`: tokens that a token attends to, a number for each layer; with
    fewer numbers than layers they repeat. `sink_token_length`: first tokens, which all others attend to besides their window.
    `free_gpu_memory_fraction`: share of the memory that is free once the model is loaded (None: 0.9 on a GPU). The smallest
    of several limits holds. `event_buffer_max_size`: KV cache events that are kept.
    """

    enable_block_reuse: bool = field(BOOL, default=True)
    max_tokens: int | None = field(optional(POSITIVE), default=None)
    max_attention_window: list[int] | None = field(optional(list_of(POSITIVE)), default=None)
    sink_token_length: int | None = field(optional(INT32), default=None)
    free_gpu_memory_fraction: float | None = field(optional(FRACTION), default=None)
    host_cache_size: int | None = field(optional(UINT64), default=None)
    onboard_blocks: bool = field(BOOL, default=True)
    cross_kv_cache_fraction: float | None = field(optional(FLOAT), default=None)
    secondary_offload_min_priority: int | None = field(optional(UINT32), default=None)
    event_buffer_max_size: int = field(UINT64, default=0)
    enable_partial_reuse: bool = field(BOOL, default=True, kw_only=True)
    copy_on_partial_reuse: bool = field(BOOL, default=True, kw_only=True)
    use_uvm: bool = field(BOOL, default=False, kw_only=True)
    attention_dp_events_gather_period_ms: int = field(INT32, default=5, kw_only=True)
    runtime_defaults: RuntimeDefaults | None = field(optional(of(RuntimeDefaults)), default=None, kw_only=True)
    max_gpu_total_bytes: int = field(UINT64, default=0, kw_only=True)

    def _made(self) -> None:
        """Apply the runtime defaults, which are no attribute afterwards, as in TensorRT-LLM."""
        defaults = self.__dict__.pop("runtime_defaults")
        if defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(defaults)

    def fill_empty_fields_from_runtime_defaults(self, runtime_defaults: RuntimeDefaults) -> None:
        """Set the fields that are unset to the defaults of the model."""
        if self.max_attention_window is None:
            self.max_attention_window = runtime_defaults.max_attention_window
        if self.sink_token_length is None:
            self.sink_token_length = runtime_defaults.sink_token_length


class DynamicBatchConfig(Record):
    """Tuning of the batch's limits while serving, from a moving average over requests. Read-only."""

    enable_batch_size_tuning: bool = constant(BOOL)
    enable_max_num_tokens_tuning: bool = constant(BOOL)
    dynamic_batch_moving_average_window: int = constant(INT32)


class SchedulerConfig(Record):
    """The policies that admit requests and cut long prompts. Read-only."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = constant(
        of(CapacitySchedulerPolicy), default=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    )
    context_chunking_policy: ContextChunkingPolicy | None = constant(optional(of(ContextChunkingPolicy)), default=None)
    dynamic_batch_config: DynamicBatchConfig | None = constant(optional(of(DynamicBatchConfig)), default=None)


class PeftCacheConfig(Record):
    """Sizes of the caches of LoRA weights. Read-only."""

    num_host_module_layer: int = constant(INT32, default=0)
    num_device_module_layer: int = constant(INT32, default=0)
    optimal_adapter_size: int = constant(INT32, default=8)
    max_adapter_size: int = constant(INT32, default=64)
    num_put_workers: int = constant(INT32, default=1)
    num_ensure_workers: int = constant(INT32, default=1)
    num_copy_streams: int = constant(INT32, default=1)
    max_pages_per_block_host: int = constant(INT32, default=24)
    max_pages_per_block_device: int = constant(INT32, default=8)
    device_cache_percent: float | None = constant(optional(FLOAT), default=None)
    host_cache_size: int | None = constant(optional(UINT64), default=None)
    lora_prefetch_dir: str | None = constant(optional(STR), default=None)


class OrchestratorConfig(Record):
    """With CommunicationMode.ORCHESTRATOR. `worker_executable_path` is not used: this project starts its own engine process."""

    is_orchestrator: bool = field(BOOL, default=True)
    worker_executable_path: str = field(PATH, default="")
    orch_leader_comm: Any = field(optional(ANY), default=None)
    spawn_processes: bool = field(BOOL, default=True)


class ParallelConfig(Record):
    """Where the model runs: in this process (LEADER), or in an engine process (ORCHESTRATOR). One rank, one device, one node."""

    communication_type: CommunicationType = field(of(CommunicationType), default=CommunicationType.MPI)
    communication_mode: CommunicationMode = field(of(CommunicationMode), default=CommunicationMode.LEADER)
    device_ids: list[int] | None = field(optional(list_of(INT32)), default=None)
    participant_ids: list[int] | None = field(optional(list_of(INT32)), default=None)
    orchestrator_config: OrchestratorConfig | None = field(optional(copy_of(OrchestratorConfig)), default=None)
    num_nodes: int | None = field(optional(INT32), default=None)


class DebugConfig(Record):
    """Tensors of the model that are kept for debugging."""

    debug_input_tensors: bool = field(BOOL, default=False)
    debug_output_tensors: bool = field(BOOL, default=False)
    debug_tensor_names: list[str] = field(list_of(STR), factory=list)
    debug_tensors_max_iterations: int = field(INT32, default=0)


class ExtendedRuntimePerfKnobConfig(Record):
    """Knobs that change speed only. `cuda_graph_mode`: replay steps that only generate."""

    multi_block_mode: bool = field(BOOL, default=True)
    enable_context_fmha_fp32_acc: bool = field(BOOL, default=False)
    cuda_graph_mode: bool = field(BOOL, default=False)
    cuda_graph_cache_size: int = field(INT32, default=0)


class SpeculativeDecodingConfig(Record):
    """`fast_logits`: fetch the logits of the draft model from its own process."""

    fast_logits: bool = field(BOOL, default=False)


class CacheTransceiverConfig(Record):
    """How KV travels between engines that run one phase each."""

    backend: Any = field(optional(ANY), default=None)
    max_tokens_in_buffer: int | None = field(optional(UINT64), default=None)
    kv_transfer_timeout_ms: int | None = field(optional(INT32), default=None)


class ExecutorConfig(Record, dynamic=True):
    """How an Executor runs its model. Its parts can be changed in place: `config.kv_cache_config.max_tokens = 42`.

    `max_batch_size`: requests that run at once (None: 64). `max_num_tokens`: tokens of one iteration (None: 8192).
    `max_queue_size`: requests that wait (None, 0 or -1: any number). `peft_cache_config`: None refuses requests with
    a LoRA adapter. Attributes of any other name may be set; they are pickled, too.
    """

    max_beam_width: int = field(POSITIVE, default=1)
    scheduler_config: SchedulerConfig = field(copy_of(SchedulerConfig), factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(copy_of(KvCacheConfig), factory=KvCacheConfig)
    enable_chunked_context: bool = field(BOOL, default=False)
    normalize_log_probs: bool = field(BOOL, default=True)
    iter_stats_max_iterations: int = field(COUNT, default=1000)
    request_stats_max_iterations: int = field(COUNT, default=0)
    batching_type: BatchingType = field(of(BatchingType), default=BatchingType.INFLIGHT)
    max_batch_size: int | None = field(optional(POSITIVE), default=None)
    max_num_tokens: int | None = field(optional(POSITIVE), default=None)
    parallel_config: ParallelConfig | None = field(optional(copy_of(ParallelConfig)), default=None)
    peft_cache_config: PeftCacheConfig | None = field(optional(copy_of(PeftCacheConfig)), factory=PeftCacheConfig)
    logits_post_processor_config: LogitsPostProcessorConfig | None = field(
        optional(copy_of(LogitsPostProcessorConfig)), default=None
    )
    decoding_config: DecodingConfig | None = field(optional(copy_of(DecodingConfig)), default=None)
    use_gpu_direct_storage: bool = field(BOOL, default=False)
    gpu_weights_percent: float = field(FLOAT, default=1.0)
    max_queue_size: int | None = field(optional(INT32), default=None)
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        copy_of(ExtendedRuntimePerfKnobConfig), factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = field(optional(copy_of(DebugConfig)), default=None)
    recv_poll_period_ms: int = field(INT32, default=0)
    max_seq_idle_microseconds: int = field(UINT64, default=180_000_000)
    spec_dec_config: SpeculativeDecodingConfig | None = field(
        optional(copy_of(SpeculativeDecodingConfig)), default=None
    )
    guided_decoding_config: GuidedDecodingConfig | None = field(optional(copy_of(GuidedDecodingConfig)), default=None)
    additional_model_outputs: list[AdditionalModelOutput] | None = field(
        optional(list_of(copy_of(AdditionalModelOutput))), default=None
    )
    cache_transceiver_config: CacheTransceiverConfig | None = field(
        optional(copy_of(CacheTransceiverConfig)), default=None
    )
    gather_generation_logits: bool = field(BOOL, default=False)
    mm_embedding_offloading: bool = field(BOOL, default=False)
    enable_trt_overlap: bool = field(BOOL, default=False)
    fail_fast_on_attention_window_too_large: bool = field(BOOL, default=False)
