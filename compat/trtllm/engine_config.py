"""ExecutorConfig -> EngineConfig. What is not honoured is refused by name; what has no effect here is listed as such."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from backend.api import ConfigError
from backend.api.config import DEBUG_INPUTS, EngineConfig
from backend.api.config_file import checked_config
from backend.api.config_ranges import MAX_SECONDS, RANGES
from backend.core.gathered import LOGITS
from compat.trtllm.configs import ExecutorConfig, ParallelConfig
from compat.trtllm.enums import BatchingType, CapacitySchedulerPolicy, CommunicationMode, ContextChunkingPolicy

BASE = "engine_config"  # a dynamic attribute of ExecutorConfig: an EngineConfig, for what the bindings have no name for
MAX_NUM_TOKENS = 8192  # what TensorRT-LLM builds an engine for, unless it is told otherwise
MAX_DRAFT_TOKENS = int(RANGES["speculation.max_draft_tokens"][1])
_ANY_NUMBER = 1 << 40
_KEY = re.compile(rf"\b({'|'.join(EngineConfig.__struct_fields__)})\.[a-z_]+")

# attribute of ExecutorConfig -> the values that are served, and what to do instead
_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "kv_cache_config.host_cache_size": ((None, 0), "evicted KV is computed again, not kept on the host; leave it out"),
    "kv_cache_config.cross_kv_cache_fraction": ((None,), "only decoder models are served; leave it out"),
    "kv_cache_config.use_uvm": ((False,), "leave it out"),
    "kv_cache_config.max_gpu_total_bytes": ((0,), "use max_tokens or free_gpu_memory_fraction"),
    "cache_transceiver_config": ((None,), "both phases run in one engine; leave it out"),
    "spec_dec_config.fast_logits": ((False,), "guesses are verified by their tokens, without logits; leave it out"),
    "use_gpu_direct_storage": ((False,), "leave it out"),
    "gpu_weights_percent": ((1.0,), "all weights lie on the device; leave it out"),
    "mm_embedding_offloading": ((False,), "only tokens are taken; leave it out"),
}
_DECODING_MODES = ("Auto", "TopK", "TopP", "TopKTopP", "BeamSearch", "Lookahead")

# Any value is right, because what it tunes is not there: kv_cache_config.onboard_blocks, secondary_offload_min_priority (no
# host cache), copy_on_partial_reuse (a matching part is always copied), attention_dp_events_gather_period_ms (one rank),
# recv_poll_period_ms (nothing polls), enable_trt_overlap (upstream has removed it), max_seq_idle_microseconds (idle KV goes when
# room is needed), normalize_log_probs (of beams), gather_generation_logits (logits are there for who asks), multi_block_mode,
# enable_context_fmha_fp32_acc.

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


def _windows(config: ExecutorConfig) -> tuple[int, ...] | None:
    """An empty list says nothing, like None."""
    return tuple(config.kv_cache_config.max_attention_window or ()) or None


def _debug_tensors(config: ExecutorConfig) -> tuple[str, ...]:
    """Names choose among all tensors. Without names it is all inputs, all outputs, or both."""
    debug = config.debug_config
    if debug is None:
        return ()
    inputs = DEBUG_INPUTS if debug.debug_input_tensors else ()
    additional = [each.name for each in config.additional_model_outputs or ()]
    outputs = dict.fromkeys((LOGITS, *additional)) if debug.debug_output_tensors else ()
    return tuple(debug.debug_tensor_names) or (*inputs, *outputs)


def _max_debug_iterations(config: ExecutorConfig) -> int:
    return config.debug_config.debug_tensors_max_iterations if config.debug_config and _debug_tensors(config) else 0


def _speculation(config: ExecutorConfig) -> str | None:
    """Lookahead decoding is served by lookup, which needs no window of its own."""
    mode = _at(config, "decoding_config.decoding_mode")
    return "lookup" if mode is not None and mode.isLookahead() else None


def _max_draft_tokens(config: ExecutorConfig) -> int | None:
    lookahead = _at(config, "decoding_config.lookahead_decoding_config")
    return None if lookahead is None else min(max(1, lookahead.max_ngram_size - 1), MAX_DRAFT_TOKENS)


def _guided_backend(config: ExecutorConfig) -> str:
    """Without a GuidedDecodingConfig nobody may ask for guides, as with TensorRT-LLM."""
    guided = config.guided_decoding_config
    return "none" if guided is None else guided.backend.name.lower()


def _max_queue_size(config: ExecutorConfig) -> int:
    """None, 0 and -1 set no limit, as in TensorRT-LLM."""
    return _ANY_NUMBER if config.max_queue_size in (None, 0, -1) else config.max_queue_size


# key of EngineConfig -> the attribute of ExecutorConfig that it has its value from; None leaves the base's
_TAKEN: dict[str, str] = {
    "scheduler.max_batch_size": "max_batch_size",
    "scheduler.max_beam_width": "max_beam_width",
    "scheduler.enable_batch_size_tuning": "scheduler_config.dynamic_batch_config.enable_batch_size_tuning",
    "scheduler.enable_max_num_tokens_tuning": "scheduler_config.dynamic_batch_config.enable_max_num_tokens_tuning",
    "scheduler.tuning_requests": "scheduler_config.dynamic_batch_config.dynamic_batch_moving_average_window",
    "scheduler.enable_chunked_context": "enable_chunked_context",
    "kv_cache.enable_block_reuse": "kv_cache_config.enable_block_reuse",
    "kv_cache.enable_partial_reuse": "kv_cache_config.enable_partial_reuse",
    "kv_cache.max_tokens": "kv_cache_config.max_tokens",
    "kv_cache.free_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache.sink_tokens": "kv_cache_config.sink_token_length",
    "lora.max_rank": "peft_cache_config.max_adapter_size",
    "lora.host_bytes": "peft_cache_config.host_cache_size",
    "lora.device_fraction": "peft_cache_config.device_cache_percent",
    "lora.host_module_layers": "peft_cache_config.num_host_module_layer",
    "lora.device_module_layers": "peft_cache_config.num_device_module_layer",
    "lora.page_rank": "peft_cache_config.optimal_adapter_size",
    "lora.host_pages_per_block": "peft_cache_config.max_pages_per_block_host",
    "lora.device_pages_per_block": "peft_cache_config.max_pages_per_block_device",
    "lora.put_workers": "peft_cache_config.num_put_workers",
    "lora.ensure_workers": "peft_cache_config.num_ensure_workers",
    "lora.copy_streams": "peft_cache_config.num_copy_streams",
    "lora.prefetch_dir": "peft_cache_config.lora_prefetch_dir",
    "records.max_iterations": "iter_stats_max_iterations",
    "records.max_request_iterations": "request_stats_max_iterations",
    "records.max_kv_events": "kv_cache_config.event_buffer_max_size",
}
# key of EngineConfig -> its value, made of the ExecutorConfig; None leaves the base's
_MADE: dict[str, Callable[[ExecutorConfig], Any]] = {
    "scheduler.max_num_tokens": lambda config: config.max_num_tokens or MAX_NUM_TOKENS,
    "scheduler.policy": lambda config: _POLICIES[config.scheduler_config.capacity_scheduler_policy],
    "scheduler.batching": lambda config: "static" if config.batching_type is BatchingType.STATIC else None,
    "scheduler.chunking_policy": lambda config: _CHUNKING[config.scheduler_config.context_chunking_policy],
    "kv_cache.max_attention_window": _windows,
    # One program owns the engine: all its requests may share KV per token, as with TensorRT-LLM.
    "kv_cache.sharing": lambda config: "all",
    "lora.enabled": lambda config: config.peft_cache_config is not None or None,
    # Nothing is kept of them unless a request asks.
    "model.gather_context_logits": lambda config: True,
    "model.gather_generation_logits": lambda config: True,
    "model.additional_outputs": lambda config: tuple(each.name for each in config.additional_model_outputs or ()),
    "model.cuda_graphs": lambda config: config.extended_runtime_perf_knob_config.cuda_graph_mode or None,
    "limits.max_queue_size": _max_queue_size,
    "limits.max_queued_tokens": lambda config: _ANY_NUMBER,
    "limits.default_timeout_s": lambda config: MAX_SECONDS,  # no deadline, unless a request has one
    "limits.max_timeout_s": lambda config: MAX_SECONDS,
    "limits.max_words": lambda config: 65536,
    "limits.max_word_tokens": lambda config: 65536,
    "limits.max_logit_bias": lambda config: 1 << 20,
    "guided.backend": _guided_backend,
    "speculation.mode": _speculation,
    "speculation.max_draft_tokens": _max_draft_tokens,
    "records.max_debug_iterations": _max_debug_iterations,
    "records.debug_tensors": _debug_tensors,
}
# What errors call a key: the attribute that the program has set.
_NAMES = _TAKEN | {
    "scheduler.max_num_tokens": "max_num_tokens",
    "kv_cache.max_attention_window": "kv_cache_config.max_attention_window",
    "limits.max_queue_size": "max_queue_size",
    "records.max_debug_iterations": "debug_config.debug_tensors_max_iterations",
}


def engine_config(config: ExecutorConfig) -> EngineConfig:
    """The engine's configuration. Raises RuntimeError for what is not served, with the name, the value and the remedy."""
    _check_served(config)
    base = config.__dict__.get(BASE, EngineConfig())
    if not isinstance(base, EngineConfig):
        raise TypeError(f"ExecutorConfig.{BASE} is a {type(base).__name__}, a backend.api.EngineConfig is needed")
    values = {key: _at(config, path) for key, path in _TAKEN.items()} | {
        key: make(config) for key, make in _MADE.items()
    }
    tree = msgspec.to_builtins(base)
    for key, value in values.items():
        section, _, name = key.partition(".")
        if value is not None:
            tree[section][name] = value
    if config.max_batch_size is None:  # every row needs a token of each step
        tree["scheduler"]["max_batch_size"] = min(base.scheduler.max_batch_size, tree["scheduler"]["max_num_tokens"])
    try:
        return checked_config(tree)
    except ConfigError as error:
        raise RuntimeError(_in_their_words(str(error))) from None


def _in_their_words(error: str) -> str:
    """An error of the configuration, with the attributes of ExecutorConfig in place of keys, and without the command line."""
    told = error.removeprefix("configuration: ").partition("; change it with --set")[0]
    return _KEY.sub(lambda found: f"ExecutorConfig.{_NAMES.get(found[0], f'{BASE}.{found[0]}')}", told)


def runs_in_own_process(parallel: ParallelConfig | None) -> bool:
    """True if the engine is to be a process of its own. Raises RuntimeError for more ranks than there are."""
    if parallel is None:
        return False
    for name, ids in (("device_ids", parallel.device_ids), ("participant_ids", parallel.participant_ids)):
        if ids is not None and len(ids) > 1:
            raise _refusal(f"parallel_config.{name}", ids, "this version runs one rank; give one id")
    if parallel.num_nodes not in (None, 1):
        raise _refusal("parallel_config.num_nodes", parallel.num_nodes, "this version runs one rank on one node")
    if parallel.communication_mode is CommunicationMode.LEADER:
        return False
    orchestrator = parallel.orchestrator_config
    if orchestrator is not None and not orchestrator.is_orchestrator:
        what = "parallel_config.orchestrator_config.is_orchestrator"
        raise _refusal(what, False, "the Executor starts its own engine process; run the orchestrator only")
    if orchestrator is not None and not orchestrator.spawn_processes:
        what = "parallel_config.orchestrator_config.spawn_processes"
        raise _refusal(what, False, "the Executor starts its own engine process; leave it out")
    return True


def _check_served(config: ExecutorConfig) -> None:
    for path, (served, remedy) in _SERVED.items():
        value = _at(config, path)
        if value is not None and value not in served:
            raise _refusal(path, value, remedy)
    if _debug_tensors(config) and _max_debug_iterations(config) < 1:
        what = "debug_config.debug_tensors_max_iterations"
        remedy = "tensors are kept for the latest iterations, not written to files; give 1 or more"
        raise _refusal(what, _max_debug_iterations(config), remedy)
    sink_tokens = config.kv_cache_config.sink_token_length
    if sink_tokens is not None and sink_tokens < 0:
        raise _refusal("kv_cache_config.sink_token_length", sink_tokens, "give 0 or more")
    if config.batching_type is BatchingType.STATIC and config.logits_post_processor_config is not None:
        raise _refusal(
            "logits_post_processor_config", "given", "they do not run with BatchingType.STATIC; use INFLIGHT"
        )
    decoding = config.decoding_config
    if decoding is not None and decoding.decoding_mode is not None:
        if decoding.decoding_mode.name not in _DECODING_MODES:
            raise _refusal("decoding_config.decoding_mode", decoding.decoding_mode, "use DecodingMode.Auto()")


def _at(config: ExecutorConfig, path: str) -> Any:
    """The value at a dotted path; None where one of the records on the way is None."""
    value: Any = config
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _refusal(name: str, value: object, remedy: str) -> RuntimeError:
    return RuntimeError(f"ExecutorConfig.{name} is {value}, which this version does not serve: {remedy}")
