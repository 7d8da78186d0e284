"""The parameters that TensorRT-LLM's own config.pbtxt files hold: each is honoured, without effect here, or refused by name.

`""` and `${...}`, what a template leaves behind, are unset. A parameter of `tensorrt_llm` changes the engine's configuration
before the engine starts. What was set on the server (`--set`, a configuration file) wins: a key counts as set there when it
differs from its default. All other models take the configuration that the engine tells them. docs/parameters.md is written
from these tables by tools/write_parameter_table.py.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from backend.api import ConfigError, EngineConfig
from backend.api.config import check_config

Convert = Callable[[str], Any]
TRUE, FALSE = ("true", "1", "t", "y", "yes"), ("false", "0", "f", "n", "no")
TRITONS_OWN = ("role", "EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS")  # `role` is this project's
QUEUE_SIZE = "dynamic_batching.default_queue_policy.max_queue_size"


class Parameter(NamedTuple):
    """One parameter. `convert` reads its value and raises ValueError with what is expected; None refuses no value."""

    key: str
    fate: Literal["honoured", "no effect", "refused"]
    note: str  # no effect: why; refused: the feature; honoured: what `target` does not say
    target: str = ""  # honoured: the key of the configuration; "" = the model's front reads it
    convert: Convert | None = None
    neutral: tuple[str, ...] = ()  # of a refused one, in lower case: values that ask for nothing


class Settings(NamedTuple):
    """The configuration with the parameters of a model's config.pbtxt, and a sentence about each for the log."""

    config: EngineConfig
    sentences: list[str]


def is_true(text: str) -> bool:
    """Raises ValueError for a text that is neither yes nor no."""
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
    """Map a choice to the keys that it sets; None sets none."""

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


_TYPES = {"inflight_fused_batching": "fused", "inflight_batching": "separate", "v1": "static"}
_DECODING = {**dict.fromkeys(("auto", "top_k", "top_p", "top_k_top_p", "beam_search")), "lookahead": "lookup"}
_GUIDED = {"xgrammar": "xgrammar", "llguidance": "llguidance"}
_POLICIES = {name: name for name in ("guaranteed_no_evict", "max_utilization", "static_batch")}


def _honoured(key: str, target: str, convert: Convert, note: str = "") -> Parameter:
    return Parameter(key, "honoured", note, target, convert)


def _no_effect(note: str, *keys: str) -> tuple[Parameter, ...]:
    return tuple(Parameter(key, "no effect", note) for key in keys)


def _refused(feature: str, *keys: str, neutral: tuple[str, ...] = ()) -> tuple[Parameter, ...]:
    return tuple(Parameter(key, "refused", feature, neutral=neutral) for key in keys)


_ENGINE = (
    _honoured("gpt_model_type", "scheduler.batching", _chosen(_TYPES), "`v1`: static batches"),
    _honoured("batching_strategy", "scheduler.batching", _chosen(_TYPES), "the newer name of `gpt_model_type`"),
    _honoured("gpt_model_path", "model.path", str, "a Hugging Face checkpoint or a GGUF file, no TensorRT engine"),
    *_refused("an encoder", "encoder_model_path"),
    _honoured("batch_scheduler_policy", "scheduler.policy", _chosen(_POLICIES)),
    _honoured("max_tokens_in_paged_kv_cache", "kv_cache.max_tokens", _whole),
    _honoured("kv_cache_free_gpu_mem_fraction", "kv_cache.free_memory_fraction", _number, "on a CPU: of its memory"),
    *_no_effect("there is no encoder", "cross_kv_cache_fraction"),
    *_no_effect(
        "evicted KV is computed again and never moved to the host",
        "kv_cache_host_memory_bytes",
        "kv_cache_onboard_blocks",
    ),
    _honoured("enable_kv_cache_reuse", "kv_cache.enable_block_reuse", is_true),
    _honoured(
        "sink_token_length", "kv_cache.sink_tokens", _whole, "they are seen besides the window, not as a part of it"
    ),
    _honoured(
        "max_attention_window_size",
        "kv_cache.max_attention_window",
        _windows,
        "one number, or several separated by commas, which the layers take in turn",
    ),
    _honoured("max_beam_width", "scheduler.max_beam_width", _whole),
    _honoured(
        "decoding_mode", "speculation.mode", _chosen(_DECODING), "`lookahead`: lookup; else each request decides"
    ),
    _honoured("enable_chunked_context", "scheduler.enable_chunked_context", is_true),
    *_refused("log-probabilities that are not normalised", "normalize_log_probs", neutral=TRUE),
    _honoured("exclude_input_in_output", "triton.exclude_input_in_output", is_true, "for all models of the server"),
    _honoured("cancellation_check_period_ms", "triton.cancellation_check_period_ms", _whole),
    _honoured("stats_check_period_ms", "triton.stats_period_ms", _whole),
    *_no_effect(
        "the engine polls nothing and keeps no such list",
        "recv_poll_period_ms",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
    ),
    _honoured("gpu_device_ids", "model.device", _device, "one GPU"),
    *_refused("several processes of one model", "participant_ids"),
    *_refused("several nodes", "num_nodes", neutral=("1",)),
    *_refused("weights streamed to the GPU", "gpu_weights_percent", neutral=("1", "1.0")),
    *_no_effect("the engine process is this project's own", "executor_worker_path"),
    _honoured("lora_cache_max_adapter_size", "lora.max_rank", _whole),
    _honoured("lora_cache_gpu_memory_fraction", "lora.device_fraction", _number),
    _honoured("lora_cache_host_memory_bytes", "lora.host_bytes", _whole),
    _honoured("lora_cache_optimal_adapter_size", "lora.page_rank", _whole),
    _honoured("lora_prefetch_dir", "lora.prefetch_dir", str, "where `lora.enabled` is set"),
    *_no_effect("kernels are chosen by `model.kernels`", "multi_block_mode"),
    *_no_effect("attention always accumulates in float32", "enable_context_fmha_fp32_acc"),
    _honoured("cuda_graph_mode", "model.cuda_graphs", is_true),
    *_no_effect("CUDA graphs are kept for the batch sizes that occur", "cuda_graph_cache_size"),
    *_no_effect("upstream has removed it", "enable_trt_overlap"),
    _honoured("lookahead_ngram_size", "speculation.max_draft_tokens", _drafts_of_ngram, "one less; 0: unset"),
    *_no_effect(
        "guesses come from lookup, not from a window", "lookahead_window_size", "lookahead_verification_set_size"
    ),
    *_refused("speculative decoding", "medusa_choices", "eagle_choices"),
    *_refused("speculative decoding", "speculative_decoding_fast_logits", neutral=FALSE),
    _honoured("guided_decoding_backend", "guided.backend", _chosen(_GUIDED)),
    _honoured("xgrammar_tokenizer_info_path", "guided.tokenizer_info", str, "whatever the backend"),
    *_no_effect("it serves guided decoding alone, which takes the model's own tokenizer", "tokenizer_dir"),
)
_TOKENIZER = Parameter("tokenizer_dir", "honoured", "else the served model's own tokenizer", convert=str)
_ONE_TOKENIZER = _no_effect("the tokenizer's own files say what it is", "tokenizer_type")

PARAMETERS: dict[str, tuple[Parameter, ...]] = {
    "tensorrt_llm": _ENGINE,
    "preprocessing": (
        _TOKENIZER,
        Parameter("add_special_tokens", "honoured", "of `QUERY` and `DECODER_QUERY`; true", convert=is_true),
        *_ONE_TOKENIZER,
        *_refused("image or video input", "multimodal_model_path"),
        *_no_effect(
            "it is for image and video input, which is refused", "gpt_model_path", "max_num_images", "hf_model_path"
        ),
    ),
    "postprocessing": (
        _TOKENIZER,
        Parameter("skip_special_tokens", "honoured", "of `OUTPUT`; true", convert=is_true),
        *_ONE_TOKENIZER,
    ),
    "tensorrt_llm_bls": (
        _honoured("accumulate_tokens", "triton.accumulate_tokens", is_true, "for this model"),
        *_no_effect("it reaches the engine itself, whatever its owner is called", "tensorrt_llm_model_name"),
        *_refused("draft models", "tensorrt_llm_draft_model_name"),
        *_refused("image or video input", "multimodal_encoders_name"),
    ),
}

OWN_TOKENIZER = tuple(role for role, parameters in PARAMETERS.items() if _TOKENIZER in parameters)


def set_parameters(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of a config.pbtxt, as Triton's JSON, without those that are unset."""
    found = {key: str(value.get("string_value", "")) for key, value in model_config.get("parameters", {}).items()}
    return {key: value.strip() for key, value in found.items() if value.strip() and not value.strip().startswith("${")}


def apply_parameters(role: str, model_config: Mapping[str, Any], config: EngineConfig) -> Settings:
    """`config` with what the model's config.pbtxt sets. Raises ConfigError for what is refused, wrong or out of range."""
    known = {parameter.key: parameter for parameter in PARAMETERS.get(role, ())}
    wanted: dict[str, tuple[str, Any]] = {}  # key of the configuration -> the parameter's key and its value
    sentences = []
    for key, text in set_parameters(model_config).items() if known else ():
        if key in TRITONS_OWN:
            continue
        if key not in known:
            sentences.append(_unknown(key, known))
            continue
        parameter, value = known[key], _read(known[key], text)
        if parameter.fate == "no effect":
            sentences.append(f"{key} of config.pbtxt has no effect here: {parameter.note}")
        elif parameter.target and value is not None:
            wanted[parameter.target] = (key, value)
    if role == "tensorrt_llm" and (size := _max_queue_size(model_config)):
        wanted["limits.max_queue_size"] = (QUEUE_SIZE, size)
    return _changed(config, wanted, sentences)


def _read(parameter: Parameter, text: str) -> Any:
    """The value of a parameter. Raises ConfigError when it is wrong or asks for what is refused."""
    if parameter.fate == "refused" and text.lower() not in parameter.neutral:
        remedy = f" or set it to {parameter.neutral[0]}" if parameter.neutral else ""
        raise ConfigError(
            f"config.pbtxt: {parameter.key} is {text[:80]!r}, which asks for {parameter.note}; this version does not have "
            f"that, leave it out{remedy}"
        )
    if parameter.convert is None:
        return text
    try:
        return parameter.convert(text)
    except ValueError as error:
        word = (
            "Invalid " if parameter.key == "gpt_model_type" else ""
        )  # texts that upstream's tests look for in the log
        raise ConfigError(f"{word}{parameter.key} {text[:80]!r} in config.pbtxt: {error}") from None


def _changed(config: EngineConfig, wanted: Mapping[str, tuple[str, Any]], sentences: list[str]) -> Settings:
    default, tree = EngineConfig(), msgspec.to_builtins(config)
    for target, (key, value) in wanted.items():
        section, _, name = target.partition(".")
        present = tree[section][name]
        if present != getattr(getattr(default, section), name):
            sentences.append(
                f"{key} of config.pbtxt is not used: {target} is set to {json.dumps(present)} on the server"
            )
        else:
            tree[section][name] = value
            sentences.append(f"{target} is {json.dumps(value)}, from {key} of config.pbtxt")
    try:
        changed = msgspec.convert(tree, EngineConfig)
        check_config(changed)
    except (ConfigError, msgspec.ValidationError) as error:
        culprits = ", ".join(key for target, (key, _) in wanted.items() if target in str(error)) or ", ".join(
            key for key, _ in wanted.values()
        )
        raise ConfigError(f"config.pbtxt ({culprits}): {error}") from None
    return Settings(changed, sentences)


def _max_queue_size(model_config: Mapping[str, Any]) -> int:
    """The longest queue that Triton's dynamic batcher would hold; 0 = without limit, which is also its default."""
    policy = model_config.get("dynamic_batching", {}).get("default_queue_policy", {})
    return int(policy.get("max_queue_size") or 0)


def _unknown(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "docs/parameters.md lists those that are"
    return f"{key[:80]} of config.pbtxt is no known parameter and has no effect; {hint}"
