"""The keyword arguments of LLM, with TensorRT-LLM's names: what each changes of the configuration, and what is refused."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from backend.api import EngineConfig
from backend.api.config import ChunkingPolicy, KvCacheConfig, Policy, check_config
from compat.llm.errors import NotHere, ParameterError, refuse
from compat.llm.postprocessing import PostprocWorkerConfig
from compat.llm.program import PROGRAM
from compat.llm.speculative import speculation_fields

# argument -> key of the configuration
KEYS = {
    "dtype": "model.dtype",
    "max_seq_len": "model.max_seq_len",
    "max_batch_size": "scheduler.max_batch_size",
    "max_num_tokens": "scheduler.max_num_tokens",
    "max_beam_width": "scheduler.max_beam_width",
    "enable_chunked_prefill": "scheduler.enable_chunked_context",
    "guided_decoding_backend": "guided.backend",
    "iter_stats_max_iterations": "records.max_iterations",
    "request_stats_max_iterations": "records.max_request_iterations",
}
# argument -> values that ask for nothing, why all others are refused
NOT_HERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), "the model runs on one device"),
    "pipeline_parallel_size": ((1,), "the model runs on one device"),
    "context_parallel_size": ((1,), "the model runs on one device"),
    "tokenizer_mode": (("auto",), "the fast tokenizer is the only one"),
    "trust_remote_code": ((False,), "no code of a checkpoint is run"),
    "revision": ((None,), "a checkpoint is taken as it lies in its directory; give that of the revision"),
    "tokenizer_revision": ((None,), "a tokenizer is taken as it lies in its directory; give that of the revision"),
    "batch_wait_timeout_ms": ((0, None), "a request never waits for others"),
}
# argument -> default; handled by LLM itself
OWN: dict[str, Any] = {
    "max_input_len": None,
    "enable_tqdm": False,
    "kv_cache_config": None,
    "scheduler_config": None,
    "stream_interval": 1,
    "num_postprocess_workers": 0,
    "postprocess_tokenizer_dir": None,
    "return_perf_metrics": False,
    "batched_logits_processor": None,
    "gather_generation_logits": False,  # without effect: requests may ask for logits in any case
    "speculative_config": None,
    "enable_lora": False,
    "lora_config": None,  # with one LoRA is enabled too
    "peft_cache_config": None,
    "enable_iter_perf_stats": False,
    "enable_iter_req_stats": False,
    "disable_overlap_scheduler": False,
    "orchestrator_type": None,
    "engine_config": None,
}
# field of TensorRT-LLM's KvCacheConfig -> of ours
KV_FIELDS = {
    "enable_block_reuse": "enable_block_reuse",
    "enable_partial_reuse": "enable_partial_reuse",
    "max_tokens": "max_tokens",
    "free_gpu_memory_fraction": "free_memory_fraction",
    "dtype": "dtype",
    "tokens_per_block": "block_size",
    "max_attention_window": "max_attention_window",
    "sink_token_length": "sink_tokens",
}
KV_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "host_cache_size": (None, 0),
    "onboard_blocks": (True,),
    "cross_kv_cache_fraction": (None,),
    "secondary_offload_min_priority": (None,),
    "copy_on_partial_reuse": (True,),
    "use_uvm": (False,),
    "attention_dp_events_gather_period_ms": (5,),
    "max_gpu_total_bytes": (None, 0),
}
EVENTS = "event_buffer_max_size"  # a field of TensorRT-LLM's KvCacheConfig, here of `records`
KEPT = 1000  # records of iterations, where only that they are wanted is said
POLICIES = {name.upper(): name for name in get_args(Policy)}
CHUNKING = {name.upper(): name for name in get_args(ChunkingPolicy)}


class LlmArguments:
    """The arguments of one LLM, checked. `config` is the engine's."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Raises TypeError for an unknown argument, NotHere and ParameterError for a value, ConfigError for the engine's."""
        for name in given:
            if name not in (KEYS | OWN | NOT_HERE):
                raise TypeError(_unknown(name))
        for name, (neutral, why) in NOT_HERE.items():
            if name in given and given[name] not in neutral:
                refuse(name, given[name], why)
        own = OWN | {name: value for name, value in given.items() if name in OWN}
        self.max_input_len: int | None = own["max_input_len"]
        self.max_beam_width: int | None = given.get("max_beam_width")
        self.shows_progress: bool = own["enable_tqdm"]
        self.stream_interval = _at_least_one("stream_interval", own["stream_interval"])
        self.returns_metrics: bool = own["return_perf_metrics"]
        self.postprocess = PostprocWorkerConfig(own["num_postprocess_workers"], own["postprocess_tokenizer_dir"])
        self.batched_logits_processor: Any = own["batched_logits_processor"]
        self.has_own_process = _has_own_process(own["orchestrator_type"])
        self.config = _config(_base(own["engine_config"]), given)


def _unknown(name: str) -> str:
    known = [*KEYS, *OWN, *NOT_HERE, "model", "tokenizer", "skip_tokenizer_init"]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    return f"LLM() got an unexpected keyword argument {name!r}; {hint}"


def _has_own_process(orchestrator: str | None) -> bool:
    if orchestrator not in (None, "rpc"):
        raise NotHere(
            f"orchestrator_type is {orchestrator!r}; 'rpc' gives the engine a process of its own, None does not"
        )
    return orchestrator == "rpc"


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ParameterError(f"{name} is {value}, at least 1 is needed")
    return value


def _base(config: EngineConfig | None) -> EngineConfig:
    if config is not None and not isinstance(config, EngineConfig):
        raise TypeError(f"engine_config is a {type(config).__name__}, a backend.api.EngineConfig is needed")
    return config or PROGRAM


def _config(config: EngineConfig, given: Mapping[str, Any]) -> EngineConfig:
    """The engine's configuration with what the arguments change."""
    changes: dict[str, dict[str, Any]] = {"model": {}, "scheduler": {}, "kv_cache": {}, "records": {}, "guided": {}}
    changes["lora"] = _lora_fields(given)
    changes["speculation"] = speculation_fields(given.get("speculative_config"))
    for wanted, field in {
        "enable_iter_perf_stats": "max_iterations",
        "enable_iter_req_stats": "max_request_iterations",
    }.items():
        if given.get(wanted):
            changes["records"][field] = KEPT
    for name, key in KEYS.items():
        section, _, field = key.partition(".")
        if given.get(name) is not None:
            changes[section][field] = given[name]
    if given.get("disable_overlap_scheduler"):
        changes["scheduler"]["look_ahead"] = False
    changes["scheduler"] |= _scheduler_fields(given.get("scheduler_config"))
    kv_cache = given.get("kv_cache_config")
    if isinstance(kv_cache, KvCacheConfig):
        changes["kv_cache"] = msgspec.to_builtins(kv_cache)
    else:
        fields = _fields("kv_cache_config", kv_cache)
        if fields.get(EVENTS):
            changes["records"]["max_kv_events"] = fields[EVENTS]
        changes["kv_cache"] = _kv_fields(fields)
    return _changed(config, changes)


def _changed(config: EngineConfig, changes: dict[str, dict[str, Any]]) -> EngineConfig:
    tree = msgspec.to_builtins(config)
    for section, fields in changes.items():
        tree[section] |= fields
    try:
        changed = msgspec.convert(tree, EngineConfig)
    except msgspec.ValidationError as error:
        key = str(error).rpartition("$.")[2].rstrip("`")
        section, _, field = key.partition(".")
        value = changes.get(section, {}).get(field)
        raise ParameterError(f"{key} would be {value!r}; docs/configuration.md says what it can be") from None
    check_config(changed)
    return changed


# field of TensorRT-LLM's DynamicBatchConfig -> key of the scheduler's configuration
TUNING_FIELDS = {
    "enable_batch_size_tuning": "enable_batch_size_tuning",
    "enable_max_num_tokens_tuning": "enable_max_num_tokens_tuning",
    "dynamic_batch_moving_average_window": "tuning_requests",
}


def _fields(name: str, value: Any) -> dict[str, Any]:
    """The fields of a dictionary, or of a configuration object of another room or package."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    known = [*KV_FIELDS, *KV_NEUTRAL, EVENTS] if name == "kv_cache_config" else [*SCHEDULER_FIELDS]
    return {field: getattr(value, field) for field in known if hasattr(value, field)}


# field of TensorRT-LLM's PeftCacheConfig -> of ours
PEFT_FIELDS = {
    "max_adapter_size": "max_rank",
    "host_cache_size": "host_bytes",
    "device_cache_percent": "device_fraction",
    "num_host_module_layer": "host_module_layers",
    "num_device_module_layer": "device_module_layers",
    "optimal_adapter_size": "page_rank",
    "max_pages_per_block_host": "host_pages_per_block",
    "max_pages_per_block_device": "device_pages_per_block",
    "num_put_workers": "put_workers",
    "num_ensure_workers": "ensure_workers",
    "num_copy_streams": "copy_streams",
    "lora_prefetch_dir": "prefetch_dir",
}


def _lora_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """`max_lora_rank` is the field of a lora_config that has a meaning here; adapters are taken for all projections."""
    fields: dict[str, Any] = {}
    if given.get("enable_lora") or given.get("lora_config") is not None:
        fields["enabled"] = True
    for name, known in (("peft_cache_config", PEFT_FIELDS), ("lora_config", {"max_lora_rank": "max_rank"})):
        value = given.get(name)
        asked = value if isinstance(value, Mapping) else {each: getattr(value, each, None) for each in known}
        fields |= {ours: asked[theirs] for theirs, ours in known.items() if asked.get(theirs) is not None}
    return fields


SCHEDULER_FIELDS = ("capacity_scheduler_policy", "context_chunking_policy", "dynamic_batch_config")


def _kv_fields(given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, setting in given.items():
        if name == EVENTS:
            continue
        if name in KV_FIELDS:
            if setting is not None:
                fields[KV_FIELDS[name]] = setting
        elif name not in KV_NEUTRAL:
            raise TypeError(f"kv_cache_config has no field {name!r}; known are {', '.join([*KV_FIELDS, *KV_NEUTRAL])}")
        elif setting not in KV_NEUTRAL[name]:
            refuse(f"kv_cache_config.{name}", setting, "this version does not have it")
    return fields


def _scheduler_fields(value: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, setting in _fields("scheduler_config", value).items():
        if name not in SCHEDULER_FIELDS:
            raise TypeError(f"scheduler_config has no field {name!r}; known are {', '.join(SCHEDULER_FIELDS)}")
        if setting is None:
            continue
        if name == "dynamic_batch_config":
            fields |= {key: getattr(setting, field) for field, key in TUNING_FIELDS.items()}
            continue
        choices = POLICIES if name == "capacity_scheduler_policy" else CHUNKING
        chosen = str(getattr(setting, "name", setting)).rpartition(".")[2].upper()
        if chosen not in choices:
            raise NotHere(f"scheduler_config.{name} is {chosen}, served are {', '.join(choices)}")
        fields["policy" if choices is POLICIES else "chunking_policy"] = choices[chosen]
    return fields
