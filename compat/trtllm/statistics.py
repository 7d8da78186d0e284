"""Statistics of iterations and of requests. All attributes can be set; `to_json_str` gives TensorRT-LLM's keys."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

from compat.trtllm.enums import Enumeration, RequestStage
from compat.trtllm.kinds import BOOL, FLOAT, INT32, INT64, STR, TENSOR, UINT64, dict_of, list_of, of, optional
from compat.trtllm.record import Record, field

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


class JsonRecord(Record):
    """A record with a JSON form: sorted camelCase keys of its fields except `_NOT_IN_JSON`; None is null."""

    _NOT_IN_JSON: ClassVar[frozenset[str]] = frozenset()

    def to_json_str(self) -> str:
        """The record as JSON, as TensorRT-LLM writes it."""
        return json.dumps(self._tree(), sort_keys=True, separators=(",", ":"))

    def _tree(self) -> dict[str, Any]:
        return {json_key(name): _plain(getattr(self, name)) for name in self._fields if name not in self._NOT_IN_JSON}


def json_key(name: str) -> str:
    """`iter_latency_ms` is iterLatencyMS."""
    camel = re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), name)
    return f"{camel.removesuffix('Ms')}MS" if name.endswith("_ms") else camel


def _plain(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        return value._tree()
    if isinstance(value, Enumeration):
        return value.name
    return [_plain(item) for item in value] if isinstance(value, list) else value


class KvCacheStats(JsonRecord):
    """Blocks of the KV cache. Free ones may hold cached KV that no request uses. Hit rate = reused / (reused + missed)."""

    max_num_blocks: int = field(INT32, default=0)
    free_num_blocks: int = field(INT32, default=0)
    used_num_blocks: int = field(INT32, default=0)
    tokens_per_block: int = field(INT32, default=0)
    alloc_total_blocks: int = field(INT32, default=0)
    alloc_new_blocks: int = field(INT32, default=0)
    reused_blocks: int = field(INT32, default=0)
    missed_blocks: int = field(INT32, default=0)
    cache_hit_rate: float = field(FLOAT, default=0.0)


class StaticBatchingStats(JsonRecord):
    """An iteration of a STATIC batch. `empty_gen_slots`: rows of requests that ended before their batch did."""

    num_scheduled_requests: int = field(INT32, default=0)
    num_context_requests: int = field(INT32, default=0)
    num_ctx_tokens: int = field(INT32, default=0)
    num_gen_tokens: int = field(INT32, default=0)
    empty_gen_slots: int = field(INT32, default=0)


class InflightBatchingStats(JsonRecord):
    """An iteration with in-flight batching."""

    num_scheduled_requests: int = field(INT32, default=0)
    num_context_requests: int = field(INT32, default=0)
    num_gen_requests: int = field(INT32, default=0)
    num_paused_requests: int = field(INT32, default=0)
    num_ctx_tokens: int = field(INT32, default=0)
    micro_batch_id: int = field(INT32, default=0)
    avg_num_decoded_tokens_per_iter: float = field(FLOAT, default=0.0)


class SpecDecodingStats(JsonRecord):
    """Draft tokens of an iteration."""

    num_draft_tokens: int = field(INT64, default=0)
    num_accepted_tokens: int = field(INT64, default=0)
    num_requests_with_draft_tokens: int = field(INT64, default=0)
    acceptance_length: float = field(FLOAT, default=0.0)
    iter_latency_ms: float = field(FLOAT, default=0.0)
    draft_overhead: float = field(FLOAT, default=0.0)


class IterationStats(JsonRecord):
    """One iteration. `timestamp` as `%m-%d-%Y %H:%M:%S.%f`; memory in bytes."""

    _NOT_IN_JSON = frozenset({"num_new_active_requests", "cross_kv_cache_stats", "specdec_stats"})

    timestamp: str = field(STR, default="")
    iter: int = field(INT64, default=0)
    iter_latency_ms: float = field(FLOAT, default=0.0)
    new_active_requests_queue_latency_ms: float = field(FLOAT, default=0.0)
    num_new_active_requests: int = field(INT32, default=0)
    num_active_requests: int = field(INT32, default=0)
    num_queued_requests: int = field(INT32, default=0)
    num_completed_requests: int = field(INT32, default=0)
    max_num_active_requests: int = field(INT32, default=0)
    gpu_mem_usage: int = field(UINT64, default=0)
    cpu_mem_usage: int = field(UINT64, default=0)
    pinned_mem_usage: int = field(UINT64, default=0)
    kv_cache_stats: KvCacheStats | None = field(optional(of(KvCacheStats)), default=None)
    cross_kv_cache_stats: KvCacheStats | None = field(optional(of(KvCacheStats)), default=None)
    static_batching_stats: StaticBatchingStats | None = field(optional(of(StaticBatchingStats)), default=None)
    inflight_batching_stats: InflightBatchingStats | None = field(optional(of(InflightBatchingStats)), default=None)
    specdec_stats: SpecDecodingStats | None = field(optional(of(SpecDecodingStats)), default=None)


class DisServingRequestStats(JsonRecord):
    """KV that came from another engine."""

    kv_cache_transfer_ms: float = field(FLOAT, default=0.0)
    kv_cache_size: int = field(UINT64, default=0)


class RequestStats(JsonRecord):
    """One request in one iteration. In JSON `stage` is its name."""

    id: int = field(UINT64, default=0)
    stage: RequestStage = field(of(RequestStage), default=RequestStage.QUEUED)
    context_prefill_position: int = field(INT32, default=0)
    num_generated_tokens: int = field(INT32, default=0)
    avg_num_decoded_tokens_per_iter: float = field(FLOAT, default=0.0)
    scheduled: bool = field(BOOL, default=False)
    paused: bool = field(BOOL, default=False)
    dis_serving_stats: DisServingRequestStats | None = field(optional(of(DisServingRequestStats)), default=None)
    alloc_total_blocks_per_request: int = field(INT32, default=0)
    alloc_new_blocks_per_request: int = field(INT32, default=0)
    reused_blocks_per_request: int = field(INT32, default=0)
    missed_blocks_per_request: int = field(INT32, default=0)
    kv_cache_hit_rate_per_request: float = field(FLOAT, default=0.0)


class RequestStatsPerIteration(JsonRecord):
    """The requests of one iteration."""

    iter: int = field(INT64, default=0)
    request_stats: list[RequestStats] = field(list_of(of(RequestStats)), factory=list)


class DebugTensorsPerIteration(Record):
    """Tensors of one iteration, by name."""

    iter: int = field(UINT64, default=0)
    debug_tensors: dict[str, Tensor] = field(dict_of(STR, TENSOR), factory=dict)
