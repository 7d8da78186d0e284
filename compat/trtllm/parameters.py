"""The attributes of ExecutorConfig, and what becomes of each."""

from __future__ import annotations

from backend.api.config.ranges import RANGES
from backend.api.foreign import ForeignTable, honoured, no_effect, refused
from backend.api.processes.launched import ENV
from compat.tensorrt_llm import DYNAMIC_BATCH, KV_CACHE, PEFT_CACHE
from compat.trtllm.decoding import DecodingMode, GuidedDecodingConfig
from compat.trtllm.enums import BatchingType, CapacitySchedulerPolicy, ContextChunkingPolicy
from compat.trtllm.request_configs import AdditionalModelOutput, LookaheadDecodingConfig

MAX_NUM_TOKENS = 8192  # the default with which TensorRT-LLM builds an engine
MAX_DRAFT_TOKENS = int(RANGES["speculation.max_draft_tokens"][1])
ANY_NUMBER = 1 << 40
_DECODING_MODES = ("Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Lookahead")
_POLICIES = {
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT: "guaranteed_no_evict",
    CapacitySchedulerPolicy.MAX_UTILIZATION: "max_utilization",
    CapacitySchedulerPolicy.STATIC_BATCH: "static_batch",
}
_CHUNKING = {
    None: "first_come_first_served",
    ContextChunkingPolicy.FIRST_COME_FIRST_SERVED: "first_come_first_served",
    ContextChunkingPolicy.EQUAL_PROGRESS: "equal_progress",
}


def _static(batching: BatchingType) -> str | None:
    return "static" if batching is BatchingType.STATIC else None


def _windows(windows: list[int] | None) -> tuple[int, ...] | None:
    """An empty list sets nothing, like None."""
    return tuple(windows or ()) or None


def _mode(mode: DecodingMode | None) -> str | None:
    """Lookahead decoding is served by lookup, which needs no window of its own."""
    if mode is not None and mode.name not in _DECODING_MODES:
        raise ValueError(f"{' or '.join(_DECODING_MODES)} is expected")
    return "lookup" if mode is not None and mode.isLookahead() else None


def _max_draft_tokens(lookahead: LookaheadDecodingConfig | None) -> int | None:
    return None if lookahead is None else min(max(1, lookahead.max_ngram_size - 1), MAX_DRAFT_TOKENS)


def _guided_backend(guided: GuidedDecodingConfig | None) -> str:
    """Without a GuidedDecodingConfig requests with a guide are refused, as in TensorRT-LLM."""
    return "none" if guided is None else guided.backend.name.lower()


def _max_queue_size(size: int | None) -> int:
    """None, 0 and -1 set no limit, as in TensorRT-LLM."""
    return ANY_NUMBER if size in (None, 0, -1) else int(size)


def _names(outputs: list[AdditionalModelOutput] | None) -> tuple[str, ...]:
    return tuple(each.name for each in outputs or ())


def _is_given(config: object) -> bool | None:
    return None if config is None else True


_KNOBS = "extended_runtime_perf_knob_config"
ATTRIBUTES = ForeignTable(
    "ExecutorConfig.{}",
    honoured("max_beam_width", "scheduler.max_beam_width", "requests with more are refused"),
    honoured("max_batch_size", "scheduler.max_batch_size", "None: 64"),
    honoured("max_num_tokens", "scheduler.max_num_tokens", "None: 8192", lambda number: number or MAX_NUM_TOKENS),
    honoured("max_queue_size", "limits.max_queue_size", "None, 0 and -1: any number", _max_queue_size),
    honoured("batching_type", "scheduler.batching", "STATIC: static batches", _static),
    honoured("enable_chunked_context", "scheduler.enable_chunked_context"),
    honoured("scheduler_config.capacity_scheduler_policy", "scheduler.policy", convert=_POLICIES.__getitem__),
    honoured("scheduler_config.context_chunking_policy", "scheduler.chunking_policy", convert=_CHUNKING.__getitem__),
    *DYNAMIC_BATCH,
    *KV_CACHE,
    honoured(
        "kv_cache_config.max_attention_window", "kv_cache.max_attention_window", "layers take them in turn", _windows
    ),
    honoured("kv_cache_config.event_buffer_max_size", "records.max_kv_events"),
    *no_effect("a block that matches in part is always copied", "kv_cache_config.copy_on_partial_reuse"),
    *no_effect("there is one rank", "kv_cache_config.attention_dp_events_gather_period_ms"),
    honoured("peft_cache_config", "lora.enabled", "None: requests with an adapter are refused", _is_given),
    *PEFT_CACHE,
    honoured(
        "decoding_config.decoding_mode", "speculation.mode", "Lookahead: lookup; else each request decides", _mode
    ),
    honoured(
        "decoding_config.lookahead_decoding_config",
        "speculation.max_draft_tokens",
        "its n-gram size less one",
        _max_draft_tokens,
    ),
    *refused("drafts are verified by their tokens, without logits", "spec_dec_config.fast_logits"),
    honoured("guided_decoding_config", "guided.backend", "None: requests with a guide are refused", _guided_backend),
    honoured("logits_post_processor_config", note="not with BatchingType.STATIC"),
    honoured("additional_model_outputs", "model.additional_outputs", convert=_names),
    honoured("iter_stats_max_iterations", "records.max_iterations"),
    honoured("request_stats_max_iterations", "records.max_request_iterations"),
    honoured("debug_config", note="sets `records.debug_tensors`; it needs debug_tensors_max_iterations of 1 or more"),
    honoured("parallel_config", note="ORCHESTRATOR: the engine is a process of its own"),
    honoured(
        "parallel_config.num_nodes",
        "workers.join_address",
        "2 or more: every rank is a process of this program, started by mpirun or torchrun (docs/scale.md)",
        lambda number: ENV if number is not None and number > 1 else None,
    ),
    honoured(
        "parallel_config.participant_ids",
        "workers.tensor_parallel_size",
        "as many ranks as ids, those of all stages together; their numbers are not used",
        lambda ids: len(ids) if ids else None,
    ),
    honoured("fail_fast_on_attention_window_too_large"),
    honoured(f"{_KNOBS}.cuda_graph_mode", "model.cuda_graphs", convert=lambda wanted: wanted or None),
    *no_effect("CUDA graphs are kept for the batch sizes that occur", f"{_KNOBS}.cuda_graph_cache_size"),
    *no_effect("kernels are chosen by `model.kernels`", f"{_KNOBS}.multi_block_mode"),
    *no_effect("attention always accumulates in float32", f"{_KNOBS}.enable_context_fmha_fp32_acc"),
    *no_effect("log-probabilities of beams are always normalised", "normalize_log_probs"),
    *no_effect("the engine polls nothing", "recv_poll_period_ms"),
    *no_effect("idle KV is evicted when its room is needed", "max_seq_idle_microseconds"),
    *no_effect("requests may ask for logits in any case", "gather_generation_logits"),
    honoured("enable_trt_overlap", "scheduler.look_ahead", "two steps are in flight", lambda wanted: wanted or None),
    honoured(
        "cache_transceiver_config",
        "kv_transfer.enabled",
        "KV travels with the opaque state; its fields have no effect",
        _is_given,
    ),
    *refused("files are read without it", "use_gpu_direct_storage"),
    *refused("all weights lie on the device", "gpu_weights_percent", neutral=(1.0,)),
    *refused("only tokens are taken", "mm_embedding_offloading"),
)
