"""GptManager's configuration, with the defaults of TensorRT-LLM's page on the batch manager."""

from __future__ import annotations

from compat.trtllm import configs
from compat.trtllm.enums import Enumeration
from compat.trtllm.kinds import (
    BOOL,
    FLOAT,
    FRACTION,
    INT32,
    POSITIVE,
    STR,
    UINT64,
    FieldKind,
    list_of,
    optional,
)
from compat.trtllm.record import Record, constant, copy_of, field

SEED_TIMESTAMP = "%m-%d-%Y %H:%M:%S"
WINDOWS = FieldKind("List[int]", lambda value: list_of(POSITIVE).check([value] if isinstance(value, int) else value))


class TrtGptModelType(Enumeration):
    """V1: batches in lockstep. InflightBatching: requests join at any step, prompts in steps of their own.

    InflightFusedBatching: prompts and generation share steps.
    """

    V1 = 0
    InflightBatching = 1
    InflightFusedBatching = 2


class KvCacheConfig(Record):
    """Size of the KV cache: `max_tokens` of all requests, or a share of the memory that is free after the model was loaded.

    With both the smaller one holds. `max_attention_window`: one number, or one for each layer.
    """

    max_tokens: int | None = field(optional(POSITIVE), default=None)
    max_attention_window: list[int] | None = field(optional(WINDOWS), default=None)
    sink_token_length: int | None = field(optional(INT32), default=None)
    free_gpu_memory_fraction: float | None = field(optional(FRACTION), default=None)
    enable_block_reuse: bool = field(BOOL, default=False)


class PeftCacheManagerConfig(configs.PeftCacheConfig):
    """A PeftCacheConfig with other defaults."""

    max_pages_per_block_device: int = constant(INT32, default=24)
    device_cache_percent: float | None = constant(optional(FLOAT), default=0.05)
    host_cache_size: int | None = constant(optional(UINT64), default=1 << 30)


class TrtGptModelOptionalParams(Record, dynamic=True):
    """The optional settings of a GptManager.

    `stats_timestamp_format`: format of the statistics' Timestamp, for strptime; servers append `.%f`.
    """

    kv_cache_config: KvCacheConfig = field(copy_of(KvCacheConfig), factory=KvCacheConfig)
    enable_trt_overlap: bool = field(BOOL, default=False)
    device_ids: list[int] | None = field(optional(list_of(INT32)), default=None)
    normalize_log_probs: bool = field(BOOL, default=True)
    enable_chunked_context: bool = field(BOOL, default=False)
    peft_cache_manager_config: PeftCacheManagerConfig = field(
        copy_of(PeftCacheManagerConfig), factory=PeftCacheManagerConfig
    )
    max_beam_width: int = field(POSITIVE, default=1, kw_only=True)
    scheduler_config: configs.SchedulerConfig = field(
        copy_of(configs.SchedulerConfig), factory=configs.SchedulerConfig, kw_only=True
    )
    max_batch_size: int | None = field(optional(POSITIVE), default=None, kw_only=True)
    max_num_tokens: int | None = field(optional(POSITIVE), default=None, kw_only=True)
    gather_context_logits: bool = field(BOOL, default=False, kw_only=True)
    gather_generation_logits: bool = field(BOOL, default=False, kw_only=True)
    stats_timestamp_format: str = field(STR, default=SEED_TIMESTAMP, kw_only=True)
