"""Arguments of LLM that only one of TensorRT-LLM's own backends has, and what becomes of each here."""

from __future__ import annotations

from typing import Any

from backend.api.foreign import honoured, no_effect, refused

# TensorRT-LLM's algorithms that mean one of this project's, by the values of model.quantization
QUANTIZATIONS = {"NO_QUANT": "none", "W8A16": "int8", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": "w8a8", "INT8": "w8a8"}
KV_QUANTIZATIONS = {"NO_QUANT": "auto", "INT8": "int8"}
_KNOBS = "extended_runtime_perf_knob_config"


def _name(algorithm: Any) -> str:
    return str(getattr(algorithm, "name", algorithm)).rpartition(".")[2].upper()


def _quantization(algorithm: Any) -> str | None:
    if algorithm is None:
        return None
    if _name(algorithm) not in QUANTIZATIONS:
        raise ValueError(
            f"a float checkpoint is quantised to {', '.join(QUANTIZATIONS)} while loading; for another format give a "
            f"checkpoint that is quantised, and leave it out (docs/quantisation.md)"
        )
    return QUANTIZATIONS[_name(algorithm)]


def _kv_quantization(algorithm: Any) -> str | None:
    if algorithm is None:
        return None
    if _name(algorithm) not in KV_QUANTIZATIONS:
        raise ValueError(f"{' or '.join(KV_QUANTIZATIONS)} is expected; kv_cache_config.dtype may be int4, too")
    return KV_QUANTIZATIONS[_name(algorithm)]


def _static(batching: Any) -> str | None:
    if batching is not None and _name(batching) not in ("STATIC", "INFLIGHT"):
        raise ValueError("STATIC or INFLIGHT is expected")
    return "static" if batching is not None and _name(batching) == "STATIC" else None


PYTORCH = (
    *no_effect("there is one backend, which is this project's engine", "backend"),
    honoured(
        "cuda_graph_config", "model.cuda_graphs", "None: no graphs", lambda given: False if given is None else None
    ),
    *no_effect(
        "graphs are kept for a ladder of batch sizes",
        *(f"cuda_graph_config.{field}" for field in ("batch_sizes", "max_batch_size", "enable_padding")),
    ),
    *no_effect("kernels are chosen by `model.kernels`", "attn_backend", "moe_config", "torch_compile_config"),
    *no_effect(
        "as the object",
        *(f"moe_config.{field}" for field in ("backend", "max_num_tokens", "load_balancer", "disable_finalize_fusion")),
        "moe_config.use_low_precision_moe_combine",
        *(f"torch_compile_config.enable_{field}" for field in ("fullgraph", "inductor", "piecewise_cuda_graph")),
        *(f"torch_compile_config.{field}" for field in ("capture_num_tokens", "enable_userbuffers", "max_num_streams")),
    ),
    *no_effect("one sampler knows all parameters of a request", "sampler_type", "enable_mixed_sampler"),
    *no_effect("nothing is tuned at run time", "enable_autotuner", "enable_min_latency"),
    *no_effect("the engine decides when garbage is collected", "garbage_collection_gen0_threshold"),
    *no_effect("metrics are part of the output of their request", "perf_metrics_max_requests"),
    *no_effect("`text` is what the model writes, as in TensorRT-LLM's LLM", "reasoning_parser"),
    *no_effect("ranks add up in the order of their numbers", "allreduce_strategy"),
    *no_effect("a window that no sequence can fill is an error in any case", "fail_fast_on_attention_window_too_large"),
    *refused("the format is seen from the files", "load_format", "checkpoint_format", neutral=("auto", "hf")),
    *refused("checkpoints are read by this project", "checkpoint_loader"),
    *refused(
        "each request is served by one engine", "enable_attention_dp", "attention_dp_config", "enable_lm_head_tp_in_adp"
    ),
    *refused("experts are shared out like all other weights", "moe_cluster_parallel_size", neutral=(-1, 1)),
    *refused(
        "experts are shared out like all other weights",
        *("moe_tensor_parallel_size", "moe_expert_parallel_size"),
        neutral=(-1, 1),
    ),
    *refused("each rank has a part of all tokens", "cp_config", neutral=({},)),
    *no_effect("ranks are placed by `workers.*`", "gpus_per_node"),
    *refused("every layer attends to what its model says", "sparse_attention_config"),
    *refused(
        "a request never waits for others", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", neutral=(0,)
    ),
    *refused("iterations are not printed: use enable_iter_perf_stats and get_stats", "print_iter_log"),
    *refused("there are no NVTX ranges", "enable_layerwise_nvtx_marker"),
    *refused("weights are quantised by quant_config", "force_dynamic_quantization"),
    *refused("KV leaves the engine by kv_transfer and the second level (docs/second-level.md)", "kv_connector_config"),
    *refused("the models read text only", "mm_encoder_only", "disable_mm_encoder"),
    *refused("actors have the methods that docs/scale.md lists", "ray_worker_extension_cls"),
    *refused("this program sends no traces", "otlp_traces_endpoint"),
    *refused("variables are set before a program starts", "env_overrides", neutral=({},)),
)

_BUILD = "build_config"
TENSORRT = (
    honoured(_BUILD, note="its fields follow; arguments of LLM itself win"),
    honoured(f"{_BUILD}.max_input_len", note="as max_input_len"),
    honoured(f"{_BUILD}.max_seq_len", "model.max_seq_len"),
    honoured(f"{_BUILD}.max_batch_size", "scheduler.max_batch_size"),
    honoured(f"{_BUILD}.max_beam_width", "scheduler.max_beam_width", "as max_beam_width"),
    honoured(f"{_BUILD}.max_num_tokens", "scheduler.max_num_tokens"),
    *refused("the KV cache is paged", f"{_BUILD}.kv_cache_type", neutral=("paged",)),
    *no_effect(
        "requests may ask for logits in any case",
        *(f"{_BUILD}.gather_context_logits", f"{_BUILD}.gather_generation_logits"),
    ),
    *refused("all weights lie on the device", f"{_BUILD}.weight_streaming"),
    *refused("only decoder models of text are served", f"{_BUILD}.use_mrope", f"{_BUILD}.speculative_decoding_mode"),
    *refused("nothing is built; ./everbatch doctor --model DIR checks a model", f"{_BUILD}.dry_run"),
    *no_effect(
        "nothing is built",
        *(
            f"{_BUILD}.{field}"
            for field in (
                *("opt_batch_size", "opt_num_tokens", "max_prompt_embedding_table_size", "strongly_typed"),
                *("force_num_profiles", "profiling_verbosity", "enable_debug_output", "max_draft_len", "use_refit"),
                *("input_timing_cache", "output_timing_cache", "lora_config", "weight_sparsity", "plugin_config"),
                *("use_strip_plan", "max_encoder_input_len", "visualize_network", "monitor_memory"),
            )
        ),
        *("enable_build_cache", "workspace", "fast_build", "embedding_parallel_mode"),
    ),
    honoured("quant_config", note="its fields follow"),
    honoured("quant_config.quant_algo", "model.quantization", ", ".join(QUANTIZATIONS), _quantization),
    honoured("quant_config.kv_cache_quant_algo", "kv_cache.dtype", ", ".join(KV_QUANTIZATIONS), _kv_quantization),
    *no_effect(
        "a quantised checkpoint says it itself",
        *(
            f"quant_config.{field}"
            for field in (
                *("group_size", "smoothquant_val", "clamp_val", "use_meta_recipe", "has_zero_point"),
                *("pre_quant_scale", "exclude_modules", "mamba_ssm_cache_dtype"),
            )
        ),
    ),
    *refused("nothing is calibrated while a model loads; use ./everbatch quantize --calibration FILE", "calib_config"),
    honoured("batching_type", "scheduler.batching", "STATIC: static batches", _static),
    honoured(_KNOBS, note="its fields follow"),
    honoured(f"{_KNOBS}.cuda_graph_mode", "model.cuda_graphs", convert=lambda wanted: wanted or None),
    *no_effect("graphs are kept for a ladder of batch sizes", f"{_KNOBS}.cuda_graph_cache_size"),
    *no_effect("kernels are chosen by `model.kernels`", f"{_KNOBS}.multi_block_mode"),
    *no_effect("attention always accumulates in float32", f"{_KNOBS}.enable_context_fmha_fp32_acc"),
    *no_effect("log-probabilities of beams are always normalised", "normalize_log_probs"),
    *refused("ranks are started by this project itself", "mpi_session"),
    *refused("use speculative_config", "decoding_config"),
)

# fields of the configurations of speculative decoding that are served
_SPECULATION = "speculative_config"
SPECULATION = (
    honoured(f"{_SPECULATION}.decoding_type", note="NGram, Lookahead, AUTO and Draft_Target are served"),
    honoured(f"{_SPECULATION}.max_draft_len", note="sets `speculation.max_draft_tokens`"),
    honoured(f"{_SPECULATION}.speculative_model_dir", note="of Draft_Target: sets `speculation.draft_model`"),
    honoured(f"{_SPECULATION}.speculative_model", note="the same"),
    honoured(f"{_SPECULATION}.is_public_pool", note="False: `speculation.max_shared_tokens` is 0"),
    honoured(f"{_SPECULATION}.max_ngram_size", note="of Lookahead: guesses are one less"),
    honoured(f"{_SPECULATION}.max_window_size", note="of Lookahead, with the two others"),
    honoured(f"{_SPECULATION}.max_verification_set_size", note="of Lookahead"),
    *no_effect(
        "lookup takes the longest match and keeps what the pool holds",
        *(f"{_SPECULATION}.{field}" for field in ("max_matching_ngram_size", "is_keep_all", "is_use_oldest")),
    ),
    *no_effect("the format of a draft model is seen from its files", f"{_SPECULATION}.load_format"),
    *refused("guesses are made wherever they pay", f"{_SPECULATION}.max_concurrency"),
)
