"""Checks of the configuration: values out of range, and values that contradict each other."""

from __future__ import annotations

from backend.api.checkpoint.recommended import named
from backend.api.config.endpoints import check_endpoint, check_otlp_endpoint, is_bound, port_of
from backend.api.config.quantization import budget_of
from backend.api.config.ranges import RANGES, range_in_words
from backend.api.config.schema import (
    MAX_ADAPTER_NAME,
    MAX_TOPIC,
    EngineConfig,
    KvEventsConfig,
    LoraSection,
    SchedulerConfig,
)
from backend.api.errors import ConfigError, shown
from backend.api.processes.launched import check_join_address


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError for a value out of its range or two values that contradict each other."""
    for key, (least, greatest) in RANGES.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None and not least <= each <= greatest:
                raise ConfigError(
                    f"{key} is {shown(str(each))}, allowed is {range_in_words(least, greatest)}; change it with --set {key}=VALUE"
                )
    if config.kv_cache.max_attention_window == ():
        raise ConfigError(
            "kv_cache.max_attention_window is an empty list; give one window or more, or leave it out for the model's own"
        )
    if config.kv_cache.block_size & (config.kv_cache.block_size - 1):
        raise ConfigError(
            f"kv_cache.block_size is {config.kv_cache.block_size}, a power of two is needed; use 32, 64 or 128"
        )
    num_slots, rows = config.kv_cache.num_slots, config.scheduler.max_batch_size
    if num_slots is not None and num_slots < rows:
        raise ConfigError(
            f"kv_cache.num_slots is {num_slots}, less than scheduler.max_batch_size {rows}: every running sequence needs "
            f"the KV of a slot; raise the former or lower the latter"
        )
    speculation = config.speculation
    if (speculation.mode == "draft_model") != bool(speculation.draft_model):
        raise ConfigError(
            f"speculation.mode is {speculation.mode} and speculation.draft_model is {shown(speculation.draft_model)!r}: the mode "
            f"draft_model needs the path of a checkpoint, and others have no use for one; change one of them"
        )
    scheduler = config.scheduler
    if scheduler.max_beam_width is not None and scheduler.max_beam_width > scheduler.max_batch_size:
        raise ConfigError(
            f"scheduler.max_beam_width is {scheduler.max_beam_width}, more than scheduler.max_batch_size "
            f"{scheduler.max_batch_size}: every beam is a row of the batch; lower the former or raise the latter"
        )
    if scheduler.enable_max_num_tokens_tuning and not scheduler.enable_chunked_context:
        raise ConfigError(
            "scheduler.enable_max_num_tokens_tuning is true and scheduler.enable_chunked_context is false: a prompt that is "
            "not cut may need all of max_num_tokens in one step; change one of them"
        )
    if config.kv_cache.directory and config.kv_cache.host_cache_bytes:
        raise ConfigError(
            f"kv_cache.directory is {shown(config.kv_cache.directory)} and kv_cache.host_cache_bytes is "
            f"{config.kv_cache.host_cache_bytes}, and there is one second level; leave one of them out"
        )
    _check_weights(scheduler)
    budget_of(config.model.quantization)
    tuple(named(config.model.default_sampling))
    _check_adapters(config.lora)
    if config.telemetry.otlp_endpoint:
        check_otlp_endpoint("telemetry.otlp_endpoint", config.telemetry.otlp_endpoint)
    _check_prompt_adapters(config)
    _check_kv_events(config.kv_events, config.workers.replicas)
    workers = config.workers
    check_join_address(workers.join_address, workers.num_ranks, workers.has_replicas)
    if config.scheduler.max_num_tokens < config.scheduler.max_batch_size:
        raise ConfigError(
            f"scheduler.max_num_tokens is {config.scheduler.max_num_tokens}, less than scheduler.max_batch_size "
            f"{config.scheduler.max_batch_size}: every running sequence needs one token a step; raise the former"
        )


def _check_weights(scheduler: SchedulerConfig) -> None:
    for each in scheduler.namespace_weights:
        namespace, _, turns = each.rpartition("=")
        if not (namespace and turns.isascii() and turns.isdecimal() and len(turns) < 5 and 1 <= int(turns) <= 1000):
            raise ConfigError(
                f"scheduler.namespace_weights holds {shown(each)!r}; write it as NAMESPACE=TURNS, the turns a number from 1 to "
                f"1000"
            )
    if len(scheduler.weights) < len(scheduler.namespace_weights):
        raise ConfigError("scheduler.namespace_weights gives a namespace twice; leave one of them out")


def _check_names(key: str, adapters: tuple[str, ...], directories: dict[str, str]) -> None:
    for each in adapters:
        name, _, directory = each.partition("=")
        if not directory or not 1 <= len(name) <= MAX_ADAPTER_NAME:
            raise ConfigError(
                f"{key} holds {each[:300]!r}; write it as NAME=DIRECTORY, a name of 1 to {MAX_ADAPTER_NAME} characters"
            )
    if len(directories) < len(adapters):
        raise ConfigError(f"{key} gives a name twice: {', '.join(adapters)}; leave one of them out")


def _check_prompt_adapters(config: EngineConfig) -> None:
    section = config.prompt_adapters
    _check_names("prompt_adapters.adapters", section.adapters, section.directories)
    if both := section.directories.keys() & config.lora.directories.keys():
        raise ConfigError(
            f"{min(both)[:300]!r} is a name of lora.adapters and of prompt_adapters.adapters; give one of them another name"
        )


def _check_adapters(lora: LoraSection) -> None:
    _check_names("lora.adapters", lora.adapters, lora.directories)
    if lora.adapters and not lora.enabled:
        raise ConfigError("lora.adapters names adapters and lora.enabled is false; set lora.enabled=true")
    if lora.allowed_dir and not lora.enabled:
        raise ConfigError("lora.allowed_dir is set and lora.enabled is false; set lora.enabled=true, or leave it out")


def _check_kv_events(events: KvEventsConfig, replicas: int) -> None:
    for name in ("endpoint", "replay_endpoint"):
        if endpoint := getattr(events, name):
            check_endpoint(f"kv_events.{name}", endpoint)
    if events.replay_endpoint and events.replay_endpoint == events.endpoint:
        raise ConfigError(
            f"kv_events.replay_endpoint is {shown(events.endpoint)}, as kv_events.endpoint is; give it a port of its own"
        )
    if events.replay_endpoint and not events.endpoint:
        raise ConfigError(
            "kv_events.replay_endpoint is set and kv_events.endpoint is not, so there is nothing to ask for; set both"
        )
    ports = port_of(events.endpoint), port_of(events.replay_endpoint)
    if None not in ports and is_bound(events.endpoint) and 0 < abs((ports[0] or 0) - (ports[1] or 0)) < replicas:
        raise ConfigError(
            f"kv_events.endpoint is {events.endpoint} and kv_events.replay_endpoint is {events.replay_endpoint}, and each of "
            f"{replicas} replicas takes the next port of both; choose ports that are {replicas} or more apart"
        )
    if len(events.topic) > MAX_TOPIC:
        raise ConfigError(f"kv_events.topic has {len(events.topic)} characters, the limit is {MAX_TOPIC}; shorten it")
