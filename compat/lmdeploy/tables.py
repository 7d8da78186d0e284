"""The tables of the fields of LMDeploy's configuration classes: honoured, without effect or refused (backend/api/foreign.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from backend.api.foreign import ForeignTable, honoured, no_effect, refused

_KV = {0: "auto", 4: "int4", 8: "int8"}


def _share(given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1:
        raise ValueError("a share between 0 and 1 is expected; session_len and max_batch_size bound it in tokens")
    return float(given)


def _kv_dtype(policy: Any) -> str:
    if type(policy) is not int or policy not in _KV:
        raise ValueError("0, 4 or 8 is expected")
    return _KV[policy]


def _adapters(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or not all(
        isinstance(text, str) and text for pair in given.items() for text in pair
    ):
        raise ValueError("a dictionary of names and PEFT directories is expected")
    return tuple(f"{name}={path}" for name, path in given.items())


def _one(*values: Any) -> tuple[Any, ...]:
    return (None, *values)


BOTH = (
    honoured("dtype", "model.dtype"),
    honoured("tp", "workers.tensor_parallel_size", "processes on CPUs of this machine"),
    honoured("dp", "workers.replicas", "whole engines; each request runs on one of them"),
    honoured("session_len", "model.max_seq_len"),
    honoured("max_batch_size", "scheduler.max_batch_size"),
    honoured("cache_max_entry_count", "kv_cache.free_memory_fraction", convert=_share),
    honoured("enable_prefix_caching", "kv_cache.enable_block_reuse", "on unless it is False"),
    honoured("quant_policy", "kv_cache.dtype", "0, 4 (int4) or 8 (int8)", _kv_dtype),
    honoured("max_prefill_token_num", "scheduler.max_num_tokens", "tokens of one step"),
    *no_effect("the format is seen from the files", "model_format"),
    *no_effect("statistics are kept in any case", "enable_metrics"),
    *refused("weights are always loaded", "empty_init"),
    *refused("config.json is taken as it is", "hf_overrides", neutral=({},)),
    *refused("a directory holds one revision; give that of the revision", "revision", "download_dir"),
)
_PARTS = ("attn_tp_size", "attn_dp_size", "mlp_tp_size", "mlp_dp_size", "outer_dp_size")
TURBOMIND = ForeignTable(
    "{} of TurbomindEngineConfig",
    *BOTH,
    honoured("cache_chunk_size", "kv_cache.chunk_blocks"),
    honoured("cache_block_seq_len", "kv_cache.block_size"),
    *refused("rope scaling is that of config.json", "rope_scaling_factor", neutral=(0,)),
    *refused("attention is that of config.json", "use_logn_attn"),
    *refused("the parts of a layer are shared alike by all ranks; set tp", *_PARTS, neutral=(1,)),
    *refused("devices are chosen by model.device of the configuration", "devices", neutral=([0], (0,))),
    *refused("set tp", "device_num", neutral=(1,)),
    *refused("ranks of other machines join by workers.join_address (docs/scale.md)", "nnodes", neutral=(1,)),
    *refused("ranks of other machines join by workers.join_address (docs/scale.md)", "node_rank", neutral=(0,)),
    *no_effect("the engine decides how steps share long prompts", "num_tokens_per_iter", "max_prefill_iters"),
    *no_effect("there is one way between ranks", "communicator"),
    *no_effect("the engine plans ahead where that pays", "async_"),
)
PYTORCH = ForeignTable(
    "{} of PytorchEngineConfig",
    *BOTH,
    honoured("block_size", "kv_cache.block_size"),
    honoured("adapters", "lora.adapters", "and lora.enabled: requests give a name as `adapter_name`", _adapters),
    honoured("eager_mode", "model.cuda_graphs", "True: no graphs", lambda eager: False if eager else None),
    honoured("device_type", "model.device", "where it is given"),
    *refused("the cache is sized by cache_max_entry_count", "num_cpu_blocks", "num_gpu_blocks", neutral=(0,)),
    *refused("no code of a checkpoint is run", "custom_module_map"),
    *refused("each engine has all experts of its ranks", "enable_eplb", "enable_microbatch"),
    *refused("each engine has all experts of its ranks", "ep", neutral=(1,)),
    *refused("replicas are numbered by this project", "dp_rank", neutral=(0,)),
    *no_effect(
        "the engine runs beside the program in any case", "enable_mp_engine", "mp_engine_backend", "thread_safe"
    ),
    *no_effect("ranks are processes of this machine", "distributed_executor_backend"),
    *no_effect("prompts and answers share steps", "prefill_interval"),
    *no_effect("the models read text only", "disable_vision_encoder"),
)


def _number(low: float, high: float) -> Callable[[Any], Any]:
    def check(given: Any) -> Any:
        if given is None:
            return None
        if isinstance(given, bool) or not isinstance(given, int | float) or not low <= given <= high:
            raise ValueError(f"a number from {low:g} to {high:g} is expected")
        if not math.isfinite(given):
            raise ValueError("a finite number is expected")
        return given

    return check


def _range(key: str, low: float, high: float) -> Any:
    return honoured(key, note=f"{low:g} to {high:g}", convert=_number(low, high))


# field -> that of compat.llm's SamplingParams; those of BY_SAMPLING count with do_sample only
SAMPLING = {
    **{
        name: name
        for name in ("top_p", "top_k", "min_p", "temperature", "repetition_penalty", "ignore_eos", "logprobs")
    },
    **{name: name for name in ("stop_token_ids", "bad_token_ids", "skip_special_tokens", "include_stop_str_in_output")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
    "bad_words": "bad",
}
BY_SAMPLING = ("top_p", "top_k", "min_p", "temperature", "seed")
_MOST = (1 << 31) - 1
GENERATION = ForeignTable(
    "{} of GenerationConfig",
    _range("max_new_tokens", 0, _MOST),
    honoured("do_sample", note="False: the most likely token, whatever the five below say"),
    _range("top_p", 0, 1),
    _range("top_k", 0, _MOST),
    _range("min_p", 0, 1),
    _range("temperature", 0, 2),
    honoured("random_seed", note="None: a random one", convert=_number(0, (1 << 64) - 1)),
    _range("repetition_penalty", 0.01, 100),
    honoured("ignore_eos"),
    honoured("stop_words"),
    honoured("bad_words"),
    honoured("stop_token_ids"),
    honoured("bad_token_ids"),
    _range("min_new_tokens", 0, _MOST),
    honoured("skip_special_tokens"),
    honoured("include_stop_str_in_output"),
    _range("logprobs", 0, 1 << 20),
    honoured("response_format", note="json_schema, regex_schema, json_object or text"),
    honoured("output_logits", note="`generation` or `all`"),
    *refused("one answer is made of a prompt; give the prompt several times", "n", neutral=_one(1)),
    *refused("the tokenizer decides it", "spaces_between_special_tokens", neutral=(True,)),
    *refused("use compat.llm with additional_model_outputs", "output_last_hidden_state"),
    *refused("use compat.llm with logits_processor, whose form is another", "logits_processors"),
    *refused("KV travels by compat.llm's disaggregated_params", "with_cache", "preserve_cache", "migration_request"),
)
