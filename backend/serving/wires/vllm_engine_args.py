"""1/model.json of a model for vLLM's backend: engine arguments of vLLM, by name.

One engine serves all models, and the server configures it. So no argument has an effect: a name that vLLM does not have is an
error, as in vLLM, `model` is compared with the model that is served, and the log names each of the others with the key of the
configuration that says the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from backend.api import ConfigError
from backend.api.foreign import ForeignTable, no_effect

MAX_BYTES = 1 << 20
NAMED_MODEL = "model"
SPECULATION = "speculative_config"
DEFAULT_MODEL = "the default model"

# engine argument -> the key of the configuration that says the same
OUR_KEYS = {
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "device": "model.device",
    "quantization": "model.quantization",
    "max_model_len": "model.max_seq_len",
    "enforce_eager": "model.cuda_graphs",
    "block_size": "kv_cache.block_size",
    "gpu_memory_utilization": "kv_cache.free_memory_fraction",
    "num_gpu_blocks_override": "kv_cache.max_tokens",
    "kv_cache_dtype": "kv_cache.dtype",
    "enable_prefix_caching": "kv_cache.enable_block_reuse",
    "enable_chunked_prefill": "scheduler.enable_chunked_context",
    "max_num_seqs": "scheduler.max_batch_size",
    "max_num_batched_tokens": "scheduler.max_num_tokens",
    "max_logprobs": "limits.max_top_log_probs",
    "enable_lora": "lora.enabled",
    "max_lora_rank": "lora.max_rank",
    "lora_modules": "lora.adapters",
    "guided_decoding_backend": "guided.backend",
    "speculative_config": "speculation.mode",
    "speculative_model": "speculation.draft_model",
    "num_speculative_tokens": "speculation.max_draft_tokens",
}
# method of vLLM's speculative_config -> speculation.mode
_MODES = {"ngram": "lookup", "[ngram]": "lookup", "draft_model": "draft_model"}
# The other engine arguments of vLLM 0.2 to 0.11.
_OTHERS = """
    additional_config aggregate_engine_logging allow_deprecated_quantization allowed_local_media_path
    allowed_media_domains api_process_count api_process_rank async_scheduling calculate_kv_scales code_revision
    collect_detailed_traces compilation_config config_format convert cp_kv_cache_interleave_size cpu_offload_gb
    cuda_graph_sizes data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local data_parallel_start_rank
    dbo_decode_token_threshold dbo_prefill_token_threshold dcp_kv_cache_interleave_size decode_context_parallel_size
    default_mm_loras disable_async_output_proc disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_mm_preprocessor_cache disable_nccl_for_dp_synchronization disable_sliding_window
    distributed_executor_backend download_dir enable_dbo enable_eplb enable_expert_parallel enable_log_requests
    enable_lora_bias enable_mm_embeds enable_multimodal_encoder_data_parallel enable_prompt_adapter
    enable_prompt_embeds enable_sleep_mode engine_use_ray eplb_config eplb_log_balancedness eplb_step_interval
    eplb_window_size expert_placement_strategy fully_sharded_loras generation_config
    guided_decoding_disable_additional_properties guided_decoding_disable_any_whitespace
    guided_decoding_disable_fallback hf_config_path hf_overrides hf_token ignore_patterns image_feature_size
    image_input_shape image_input_type image_token_id interleave_mm_strings io_processor_plugin
    kv_cache_memory_bytes kv_events_config kv_offloading_backend kv_offloading_size kv_sharing_fast_prefill
    kv_transfer_config limit_mm_per_prompt load_format logits_processor_pattern logits_processors logprobs_mode
    long_lora_scaling_factors long_prefill_token_threshold lora_dtype lora_extra_vocab_size
    mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype max_context_len_to_capture max_cpu_loras max_log_len
    max_long_partial_prefills max_loras max_num_partial_prefills max_paddings
    max_parallel_loading_workers max_prompt_adapter_token max_prompt_adapters max_seq_len_to_capture media_io_kwargs
    mm_encoder_attn_backend mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_processor_kwargs mm_shm_cache_max_object_size_mb model_impl model_loader_extra_config model_weights
    multi_step_stream_outputs ngram_prompt_lookup_max ngram_prompt_lookup_min nnodes node_rank num_lookahead_slots
    num_redundant_experts num_scheduler_steps observability_config optimization_level
    otlp_traces_endpoint override_attention_dtype override_generation_config override_neuron_config
    override_pooler_config override_tensor_parallel_size pipeline_parallel_size pooler_config preemption_mode
    prefill_context_parallel_size prefix_caching_hash_algo pt_load_map_location qlora_adapter_name_or_path
    quantization_param_path ray_workers_use_nsight reasoning_parser reasoning_parser_plugin revision rope_scaling
    rope_theta runner safetensors_load_strategy scheduler_cls scheduler_delay_factor scheduler_reserve_full_isl
    scheduling_policy seed served_model_name show_hidden_metrics_for_version skip_mm_profiling skip_tokenizer_init
    spec_decoding_acceptance_method speculative_disable_by_batch_size
    speculative_disable_mqa_scorer speculative_draft_tensor_parallel_size speculative_max_model_len
    speculative_model_quantization stream_interval structured_outputs_config swap_space task
    tensor_parallel_size tokenizer_mode tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type
    tokenizer_revision trust_remote_code typical_acceptance_sampler_posterior_alpha
    typical_acceptance_sampler_posterior_threshold ubatch_size use_tqdm_on_load use_v2_block_manager
    video_pruning_rate worker_cls worker_extension_cls worker_use_ray
""".split()
ARGUMENTS = ForeignTable(
    "{} of model.json",
    *no_effect("it is compared with the model that is served", NAMED_MODEL),
    *(each for name, key in OUR_KEYS.items() for each in no_effect(f"set `{key}` of the engine instead", name)),
    *no_effect("it means nothing to this engine", *_OTHERS),
)


def read_engine_args(path: Path) -> dict[str, Any]:
    """The engine arguments in the file; none where there is no file.

    Raises ConfigError for a file that cannot be read, and for a name that vLLM does not have.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"model.json has more than {MAX_BYTES} bytes; it holds vLLM's engine arguments and nothing else"
        )
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("model.json is not valid JSON; it is one object of vLLM's engine arguments") from None
    if not isinstance(given, dict):
        raise ConfigError("model.json is no JSON object; it is one object of vLLM's engine arguments")
    ARGUMENTS.check(given)
    return given


def remarks(engine_args: dict[str, Any], served_model: str) -> Iterator[str]:
    """One sentence for each argument, as none has an effect; none for a `model` that is the served one.

    `served_model`: the path or hub id of the model that is served.
    """
    for name, value in engine_args.items():
        if name == SPECULATION:
            yield _of_speculation(value)
        elif name != NAMED_MODEL:
            yield from ARGUMENTS.check({name: value}).remarks
        elif not _is_same_model(str(value), served_model):
            served = PurePath(served_model).name or DEFAULT_MODEL
            yield f"model is {str(value)[:200]}, but {served} is served (--model or model.path); it answers"


def _of_speculation(given: Any) -> str:
    """A sentence with the keys of the configuration that ask for the same: lookup for n-grams, a draft model for a model."""
    fields = given if isinstance(given, dict) else {"method": given}
    model = fields.get("model")
    method = str(fields.get("method") or (model if model in _MODES else "draft_model" if model else None))
    if method not in _MODES:
        known = "ngram (speculation.mode=lookup) and draft_model"
        return f"{SPECULATION} asks for the method {method[:200]}, which this engine does not have; it has {known}"
    keys = [f"speculation.mode={_MODES[method]}"]
    if method == "draft_model":
        keys.append(f"speculation.draft_model={str(model)[:200]}")
    if fields.get("num_speculative_tokens") is not None:
        keys.append(f"speculation.max_draft_tokens={str(fields['num_speculative_tokens'])[:200]}")
    return f"{SPECULATION} asks for {method} and has no effect here; set {', '.join(keys)} of the engine instead"


def _is_same_model(named: str, served: str) -> bool:
    """Compare paths and hub ids by their last part, and a snapshot in a hub's cache by its directory."""
    parts = PurePath(served).parts
    in_cache = "--".join(("models", *PurePath(named).parts))
    return named == served or PurePath(named).name == PurePath(served).name or in_cache in parts
