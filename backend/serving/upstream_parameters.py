"""The parameters that TensorRT-LLM's own config.pbtxt files hold, and what becomes of each.

`""` and `${...}`, which a template leaves behind, are unset. A parameter of `tensorrt_llm` changes the engine's configuration
before the engine starts. What was set on the server (`--set`, a configuration file) wins: a key counts as set there when it
differs from its default. All other models use the configuration that the engine sends them. docs/parameters.md is written
from these tables by tools/write_parameter_table.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from backend.api import ConfigError, EngineConfig
from backend.api.config.checks import check_config
from backend.api.config.multi_model import ENGINE, LABEL, OWNS
from backend.api.foreign import (
    RANKS_KEY,
    Checked,
    ForeignParameter,
    ForeignTable,
    Setting,
    honoured,
    no_effect,
    put,
    ranks_of_stage,
    refused,
)

Convert = Callable[[str], Any]
TRUE, FALSE = ("true", "1", "t", "y", "yes"), ("false", "0", "f", "n", "no")
TRITONS_OWN = ("role", ENGINE, OWNS, LABEL, "EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")  # the first are ours
QUEUE_SIZE = "dynamic_batching.default_queue_policy.max_queue_size"


class UpstreamSettings(NamedTuple):
    """The configuration with the parameters of a model's config.pbtxt, and a sentence about each for the log."""

    config: EngineConfig
    sentences: list[str]


def is_true(text: str) -> bool:
    """The truth value of a text. Raises ValueError for any other text."""
    if text.lower() not in TRUE + FALSE:
        raise ValueError("true or false is expected")
    return text.lower() in TRUE


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number is expected") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number is expected") from None


def _chosen(choices: Mapping[str, str | None]) -> Convert:
    """Map a choice to the value that it sets; None sets nothing."""

    def convert(text: str) -> str | None:
        if text.lower() not in choices:
            raise ValueError(f"{' or '.join(choices)} is expected")
        return choices[text.lower()]

    return convert


def _drafts_of_ngram(text: str) -> int | None:
    return max(1, _whole(text) - 1) if _whole(text) else None


def _windows(text: str) -> int | tuple[int, ...]:
    windows = tuple(_whole(part) for part in text.split(","))
    return windows if len(windows) > 1 else windows[0]


def _device(text: str) -> str:
    if not text.isdigit():
        raise ValueError("the id of one GPU is expected, several are not supported")
    return f"cuda:{text}"


def _num_ranks(text: str) -> int:
    """The number of the ids of MPI processes in a list."""
    ids = text.replace(";", ",").split(",")
    if not all(each.strip().isdigit() for each in ids) or len(set(ids)) < len(ids):
        raise ValueError("different ids are expected, with commas between them")
    return len(ids)


_TYPES = {"inflight_fused_batching": "fused", "inflight_batching": "separate", "v1": "static"}
_DECODING = {**dict.fromkeys(("auto", "top_k", "top_p", "top_k_top_p", "beam_search")), "lookahead": "lookup"}
_GUIDED = {"xgrammar": "xgrammar", "llguidance": "llguidance"}
_POLICIES = {name: name for name in ("guaranteed_no_evict", "max_utilization", "static_batch")}


_ENGINE = (
    honoured("gpt_model_type", "scheduler.batching", "`v1`: static batches", convert=_chosen(_TYPES)),
    honoured("batching_strategy", "scheduler.batching", "the newer name of `gpt_model_type`", convert=_chosen(_TYPES)),
    honoured("gpt_model_path", "model.path", "a Hugging Face checkpoint or a GGUF file, no TensorRT engine"),
    *refused("only decoder models are served", "encoder_model_path"),
    honoured("batch_scheduler_policy", "scheduler.policy", convert=_chosen(_POLICIES)),
    honoured("max_tokens_in_paged_kv_cache", "kv_cache.max_tokens", convert=_whole),
    honoured(
        "kv_cache_free_gpu_mem_fraction", "kv_cache.free_memory_fraction", "on a CPU: of its memory", convert=_number
    ),
    *no_effect("there is no encoder", "cross_kv_cache_fraction"),
    honoured(
        "kv_cache_host_memory_bytes",
        "kv_cache.host_cache_bytes",
        "KV beside the pool (docs/second-level.md)",
        convert=_whole,
    ),
    honoured(
        "kv_cache_onboard_blocks",
        "kv_cache.onboard_blocks",
        "false: such KV is written and not read back",
        convert=is_true,
    ),
    honoured("enable_kv_cache_reuse", "kv_cache.enable_block_reuse", convert=is_true),
    honoured(
        "sink_token_length",
        "kv_cache.sink_tokens",
        "all tokens attend to them besides the window",
        convert=_whole,
    ),
    honoured(
        "max_attention_window_size",
        "kv_cache.max_attention_window",
        "one number, or several separated by commas, which the layers take in turn",
        convert=_windows,
    ),
    honoured("max_beam_width", "scheduler.max_beam_width", convert=_whole),
    honoured(
        "decoding_mode",
        "speculation.mode",
        "`lookahead`: lookup; else each request decides",
        convert=_chosen(_DECODING),
    ),
    honoured("enable_chunked_context", "scheduler.enable_chunked_context", convert=is_true),
    *refused("log-probabilities are always normalised", "normalize_log_probs", neutral=TRUE),
    honoured(
        "exclude_input_in_output", "triton.exclude_input_in_output", "for all models of the server", convert=is_true
    ),
    honoured("cancellation_check_period_ms", "triton.cancellation_check_period_ms", convert=_whole),
    honoured("stats_check_period_ms", "triton.stats_period_ms", convert=_whole),
    *no_effect(
        "the engine polls nothing and keeps no such list",
        "recv_poll_period_ms",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
    ),
    honoured("gpu_device_ids", "model.device", "one GPU", convert=_device),
    honoured(
        "participant_ids", "workers.tensor_parallel_size", "as many ranks as ids, of all stages", convert=_num_ranks
    ),
    *refused("ranks of other nodes join by `workers.join_address`", "num_nodes", neutral=("1",)),
    *refused("all weights lie on the device", "gpu_weights_percent", neutral=("1", "1.0")),
    *no_effect("the engine process is this project's own", "executor_worker_path"),
    honoured("lora_cache_max_adapter_size", "lora.max_rank", convert=_whole),
    honoured("lora_cache_gpu_memory_fraction", "lora.device_fraction", convert=_number),
    honoured("lora_cache_host_memory_bytes", "lora.host_bytes", convert=_whole),
    honoured("lora_cache_optimal_adapter_size", "lora.page_rank", convert=_whole),
    honoured("lora_prefetch_dir", "lora.prefetch_dir", "where `lora.enabled` is set"),
    *no_effect("kernels are chosen by `model.kernels`", "multi_block_mode"),
    *no_effect("attention always accumulates in float32", "enable_context_fmha_fp32_acc"),
    honoured("cuda_graph_mode", "model.cuda_graphs", convert=is_true),
    *no_effect("CUDA graphs are kept for the batch sizes that occur", "cuda_graph_cache_size"),
    *refused("upstream refuses it too; `scheduler.look_ahead` is like it", "enable_trt_overlap", neutral=FALSE),
    honoured("lookahead_ngram_size", "speculation.max_draft_tokens", "one less; 0: unset", convert=_drafts_of_ngram),
    *no_effect(
        "drafts come from lookup, not from a window", "lookahead_window_size", "lookahead_verification_set_size"
    ),
    *refused("drafts come from lookup or from a draft model", "medusa_choices", "eagle_choices"),
    *refused("drafts are verified by their tokens, without logits", "speculative_decoding_fast_logits", neutral=FALSE),
    honoured("guided_decoding_backend", "guided.backend", convert=_chosen(_GUIDED)),
    honoured("xgrammar_tokenizer_info_path", "guided.tokenizer_info", "whatever the backend"),
    *no_effect("it serves guided decoding alone, which takes the model's own tokenizer", "tokenizer_dir"),
)
_TOKENIZER = honoured("tokenizer_dir", note="else the served model's own tokenizer")
_ONE_TOKENIZER = no_effect("the tokenizer's own files say what it is", "tokenizer_type")

_OF_ROLES: dict[str, tuple[ForeignParameter, ...]] = {
    "tensorrt_llm": _ENGINE,
    "preprocessing": (
        _TOKENIZER,
        honoured("add_special_tokens", note="of `QUERY` and `DECODER_QUERY`; true", convert=is_true),
        *_ONE_TOKENIZER,
        *refused("`ensemble` and `tensorrt_llm_bls` take images, this model text alone", "multimodal_model_path"),
        *no_effect(
            "it is for images, which this model does not take", "gpt_model_path", "max_num_images", "hf_model_path"
        ),
    ),
    "postprocessing": (
        _TOKENIZER,
        honoured("skip_special_tokens", note="of `OUTPUT`; true", convert=is_true),
        *_ONE_TOKENIZER,
    ),
    "tensorrt_llm_bls": (
        honoured("accumulate_tokens", "triton.accumulate_tokens", "for this model", convert=is_true),
        *no_effect("it reaches the engine itself, whatever its owner is called", "tensorrt_llm_model_name"),
        *refused("`speculation.draft_model` names the draft model", "tensorrt_llm_draft_model_name"),
        *no_effect("the engine has the vision tower of its own checkpoint", "multimodal_encoders_name"),
    ),
}

PARAMETERS = {role: ForeignTable("{} of config.pbtxt", *parameters) for role, parameters in _OF_ROLES.items()}
OWN_TOKENIZER = tuple(role for role, parameters in _OF_ROLES.items() if _TOKENIZER in parameters)


def set_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a config.pbtxt, as Triton's JSON, without those that are unset."""
    found = {key: str(value.get("string_value", "")) for key, value in model_config.get("parameters", {}).items()}
    return {key: value.strip() for key, value in found.items() if value.strip() and not value.strip().startswith("${")}


def apply_parameters(role: str, model_config: Mapping[str, Any], config: EngineConfig) -> UpstreamSettings:
    """`config` with what the model's config.pbtxt sets. Raises ConfigError for what is refused, wrong or out of range."""
    if role not in PARAMETERS:
        return UpstreamSettings(config, [])
    table = PARAMETERS[role]
    given = {key: text for key, text in set_parameters(model_config).items() if key not in TRITONS_OWN}
    checked = _checked(table, {key: text for key, text in given.items() if key in table})
    unknown = [f"{table.unknown(key)} It has no effect." for key in given if key not in table]
    if (ranks := checked.settings.get(RANKS_KEY)) is not None:
        checked.settings[RANKS_KEY] = ranks._replace(value=ranks_of_stage(ranks, config.workers.pipeline_parallel_size))
    if role == "tensorrt_llm" and (size := _max_queue_size(model_config)):
        checked.settings["limits.max_queue_size"] = Setting(QUEUE_SIZE, size)
    changed = _changed(config, checked.settings)
    return UpstreamSettings(changed.config, [*checked.remarks, *unknown, *changed.sentences])


def _checked(table: ForeignTable, given: Mapping[str, str]) -> Checked:
    try:
        return table.check(given)
    except ConfigError as error:  # upstream's tests look for "Invalid gpt_model_type" in the log
        word = "Invalid " if error.message.startswith("gpt_model_type ") else ""
        raise ConfigError(f"{word}{error.message}") from None


def _changed(config: EngineConfig, wanted: Mapping[str, Setting]) -> UpstreamSettings:
    """`config` with the settings whose keys still have their defaults, and a sentence about every setting."""
    default, tree, sentences = EngineConfig(), msgspec.to_builtins(config), []
    free = {target: setting for target, setting in wanted.items() if _at(config, target) == _at(default, target)}
    for target, (key, value) in wanted.items():
        if target in free:
            sentences.append(f"{target} is {json.dumps(value)}, from {key} of config.pbtxt")
        else:
            present = json.dumps(_at(config, target))
            sentences.append(f"{key} of config.pbtxt is not used: {target} is set to {present} on the server")
    put(free, tree)
    try:
        changed = msgspec.convert(tree, EngineConfig)
        check_config(changed)
    except (ConfigError, msgspec.ValidationError) as error:
        named = [key for target, (key, _) in wanted.items() if target in str(error)]
        keys = ", ".join(named or [key for key, _ in wanted.values()])
        raise ConfigError(f"config.pbtxt ({keys}): {error}") from None
    return UpstreamSettings(changed, sentences)


def _at(config: EngineConfig, target: str) -> Any:
    section, _, name = target.partition(".")
    return getattr(getattr(config, section), name)


def _max_queue_size(model_config: Mapping[str, Any]) -> int:
    """The longest queue that Triton's dynamic batcher would hold; 0 = without limit, which is also its default."""
    policy = model_config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return int(policy.get("max_queue_size") or 0)
