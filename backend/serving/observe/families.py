"""The metric families of the engine that appear in Triton's /metrics, as data.

Families named `nv_trt_llm_*` have TensorRT-LLM's names, so that its dashboards work; those named `everbatch_*` are this
project's own. TensorRT-LLM logs the values of its families as a line of JSON as well, under names of its own: `stats` here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple

import msgspec

from backend.api import EngineStats
from backend.api.stats import MISSES

FINISH_REASONS = ("END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED", "ERROR")

FINISHED = "everbatch_requests_finished_total"
ENGINE_DIED = "engine_died"  # how requests end that were in flight in an engine that died, in the eyes of that engine
TIMESTAMP = "Timestamp"

Read = Callable[[EngineStats], float]


class MetricFamily(NamedTuple):
    """One metric family with its values."""

    name: str
    description: str
    kind: str  # GAUGE or COUNTER
    label: str  # the name of the label that tells the values apart; "" when the family has one value
    values: dict[str, Read]  # for each value of the label, the function that reads it from the statistics
    stats: tuple[str, ...] = ()  # the names of these values in TensorRT-LLM's statistics


def _scheduled(stats: EngineStats) -> int:
    """The requests of the last step that still run. An idle engine keeps the record of its last step, hence the minimum."""
    return min(stats.latest.num_scheduled_requests, stats.latest.num_active_requests)


def _missed_for(reason: str) -> Read:
    return lambda stats: stats.latest.second_level.misses_total.get(reason, 0)


def _finished_with(reason: str) -> Read:
    return lambda stats: stats.counters.requests_finished_total.get(reason, 0)


_TRT_LLM = (
    MetricFamily(
        "nv_trt_llm_request_metrics",
        "TRT LLM request metrics",
        "GAUGE",
        "request_type",
        {
            "active": lambda s: s.latest.num_active_requests,
            "max": lambda s: s.latest.max_num_active_requests,
            "scheduled": lambda s: _scheduled(s),
            "context": lambda s: min(s.latest.num_context_requests, s.latest.num_active_requests),
            "waiting": lambda s: s.latest.num_active_requests - _scheduled(s),
        },
        ("Active Request Count", "Max Request Count", "Scheduled Requests", "Context Requests", "Waiting Requests"),
    ),
    MetricFamily(
        "nv_trt_llm_runtime_memory_metrics",
        "TRT LLM runtime memory metrics",
        "GAUGE",
        "memory_type",
        {
            "cpu": lambda s: s.latest.cpu_memory_bytes,
            "gpu": lambda s: s.latest.gpu_memory_bytes,
            "pinned": lambda s: 0,  # a few buffers of a step's size, which are not counted
        },
        ("Runtime CPU Memory Usage", "Runtime GPU Memory Usage", "Runtime Pinned Memory Usage"),
    ),
    MetricFamily(
        "nv_trt_llm_kv_cache_block_metrics",
        "TRT LLM KV cache block metrics",
        "GAUGE",
        "kv_cache_block_type",
        {
            "max": lambda s: s.latest.kv_cache.max_num_blocks,
            # TensorRT-LLM counts a cached block as free, because it can be taken.
            "free": lambda s: s.latest.kv_cache.free_num_blocks + s.latest.kv_cache.cached_num_blocks,
            "used": lambda s: s.latest.kv_cache.used_num_blocks,
            "tokens_per": lambda s: s.latest.kv_cache.tokens_per_block,
            "reused": lambda s: s.latest.kv_cache.reused_blocks_total,
            "fraction": lambda s: s.latest.kv_cache.used_num_blocks / max(1, s.latest.kv_cache.max_num_blocks),
        },
        (
            "Max KV cache blocks",
            "Free KV cache blocks",
            "Used KV cache blocks",
            "Tokens per KV cache block",
            "Reused KV cache blocks",
            "Fraction used KV cache blocks",
        ),
    ),
    MetricFamily(
        "nv_trt_llm_general_metrics",
        "General TRT LLM metrics",
        "GAUGE",
        "general_type",
        {"timestamp": lambda s: s.latest.timestamp_ns // 1000, "iteration_counter": lambda s: s.latest.iter},
        (TIMESTAMP, "Iteration Counter"),
    ),
    MetricFamily(
        "nv_trt_llm_disaggregated_serving_metrics",
        "TRT LLM disaggregated serving metrics",
        "COUNTER",
        "disaggregated_serving_type",
        {
            "kv_cache_transfer_ms": lambda s: s.counters.kv_transfer_ns_total / 1e6,
            "request_count": lambda s: s.counters.kv_transfers_total,
        },
        ("KV cache transfer time", "Request count"),
    ),
)

_OURS = (
    MetricFamily(
        "everbatch_kv_blocks",
        "KV cache blocks by state; free + cached + used = max",
        "GAUGE",
        "state",
        {
            "max": lambda s: s.latest.kv_cache.max_num_blocks,
            "free": lambda s: s.latest.kv_cache.free_num_blocks,
            "cached": lambda s: s.latest.kv_cache.cached_num_blocks,
            "used": lambda s: s.latest.kv_cache.used_num_blocks,
            "allocated": lambda s: s.latest.kv_cache.allocated_num_blocks,
        },
    ),
    MetricFamily(
        "everbatch_kv_blocks_total",
        "KV cache blocks handled since the engine started, by what happened to them: adopted = computed by the engine before "
        "this one and found by a request, dropped = left by it and of no use",
        "COUNTER",
        "event",
        {
            "new": lambda s: s.latest.kv_cache.alloc_new_blocks_total,
            "reused": lambda s: s.latest.kv_cache.reused_blocks_total,
            "missed": lambda s: s.latest.kv_cache.missed_blocks_total,
            "evicted": lambda s: s.latest.kv_cache.evicted_blocks_total,
            "adopted": lambda s: s.latest.kv_cache.adopted_blocks_total,
            "dropped": lambda s: s.latest.kv_cache.dropped_blocks_total,
        },
    ),
    MetricFamily(
        "everbatch_snapshots",
        "Snapshots of the states of recurrent layers, which sequences go on from",
        "GAUGE",
        "state",
        {
            "max": lambda s: s.latest.snapshots.max_num_snapshots,
            "used": lambda s: s.latest.snapshots.used_num_snapshots,
        },
    ),
    MetricFamily(
        "everbatch_snapshots_total",
        "Snapshots of states since the engine started, by what happened to them: restored = a sequence has begun behind one, "
        "evicted = lost because others needed the room",
        "COUNTER",
        "event",
        {
            "saved": lambda s: s.latest.snapshots.saved_snapshots_total,
            "restored": lambda s: s.latest.snapshots.restored_snapshots_total,
            "evicted": lambda s: s.latest.snapshots.evicted_snapshots_total,
        },
    ),
    MetricFamily(
        "everbatch_image_bytes",
        "Bytes that features of images and the pixels of live requests may take, and take",
        "GAUGE",
        "state",
        {
            "max": lambda s: s.latest.images.image_max_bytes,
            "used": lambda s: s.latest.images.image_used_bytes,
        },
    ),
    MetricFamily(
        "everbatch_images_total",
        "Images of requests since the engine started: encoded, reused = their features were held, failed",
        "COUNTER",
        "event",
        {
            "encoded": lambda s: s.latest.images.images_encoded_total,
            "reused": lambda s: s.latest.images.images_reused_total,
            "failed": lambda s: s.latest.images.images_failed_total,
        },
    ),
    MetricFamily(
        "everbatch_image_encoding_seconds_total",
        "Seconds that the encoder of images has worked",
        "COUNTER",
        "",
        {"": lambda s: s.latest.images.image_encoding_s_total},
    ),
    MetricFamily(
        "everbatch_second_level_blocks",
        "KV blocks of the second level",
        "GAUGE",
        "state",
        {
            "max": lambda s: s.latest.second_level.secondary_max_num_blocks,
            "used": lambda s: s.latest.second_level.secondary_used_num_blocks,
        },
    ),
    MetricFamily(
        "everbatch_second_level_blocks_total",
        "KV blocks by what the second level has done with them: onboarded = read back into the pool, offloaded = written, "
        "skipped = evicted before they could be written, recomputed = computed because that was expected to be quicker",
        "COUNTER",
        "event",
        {
            "onboarded": lambda s: s.latest.second_level.onboarded_blocks_total,
            "offloaded": lambda s: s.latest.second_level.offloaded_blocks_total,
            "skipped": lambda s: s.latest.second_level.skipped_blocks_total,
            "recomputed": lambda s: s.latest.second_level.recomputed_blocks_total,
        },
    ),
    MetricFamily(
        "everbatch_second_level_misses_total",
        "KV blocks of the second level that could not be used, by reason",
        "COUNTER",
        "reason",
        {reason: _missed_for(reason) for reason in MISSES},
    ),
    MetricFamily(
        "everbatch_second_level_pace",
        "Latest pace of both ways to get KV back: bytes a second of loads, waits included, and prompt tokens a second of steps",
        "GAUGE",
        "way",
        {
            "load_bytes": lambda s: s.latest.second_level.load_bytes_per_s,
            "prefill_tokens": lambda s: s.latest.second_level.prefill_tokens_per_s,
        },
    ),
    MetricFamily(
        "everbatch_tokens_total",
        "Tokens since the engine started: prompt = sent by clients, context = run through the context phase, cached = "
        "not run because their KV was found, recomputed = run again because their KV had been evicted, generated, "
        "discarded = generated, and not part of any response",
        "COUNTER",
        "kind",
        {
            "prompt": lambda s: s.counters.prompt_tokens_total,
            "context": lambda s: s.counters.context_tokens_total,
            "cached": lambda s: s.counters.cached_tokens_total,
            "recomputed": lambda s: s.counters.recomputed_tokens_total,
            "generated": lambda s: s.counters.generated_tokens_total,
            "discarded": lambda s: s.counters.discarded_tokens_total,
        },
    ),
    MetricFamily(
        "everbatch_evictions_total",
        "Sequences and prompts whose KV had been evicted when they returned, and that were recomputed",
        "COUNTER",
        "",
        {"": lambda s: s.counters.sequences_evicted_total},
    ),
    MetricFamily(
        "everbatch_requests",
        "Requests by state",
        "GAUGE",
        "state",
        {
            "active": lambda s: s.latest.num_active_requests,
            "queued": lambda s: s.latest.num_queued_requests,
            "scheduled": lambda s: _scheduled(s),
            "paused": lambda s: s.latest.num_paused_requests,
        },
    ),
    MetricFamily(
        "everbatch_requests_accepted_total",
        "Requests that the engine has accepted: those that ended, and those in flight (everbatch_requests, state active)",
        "COUNTER",
        "",
        {"": lambda s: s.counters.requests_accepted_total},
    ),
    MetricFamily(
        FINISHED,
        "Requests that ended, by reason",
        "COUNTER",
        "reason",
        {reason.lower(): _finished_with(reason) for reason in FINISH_REASONS} | {ENGINE_DIED: lambda s: 0},
    ),
    MetricFamily(
        "everbatch_requests_rejected_total",
        "Requests that were refused",
        "COUNTER",
        "",
        {"": lambda s: s.counters.requests_rejected_total},
    ),
    MetricFamily(
        "everbatch_pauses_total",
        "Sequences taken off the batch",
        "COUNTER",
        "",
        {"": lambda s: s.counters.pauses_total},
    ),
    MetricFamily(
        "everbatch_draft_tokens_total",
        "Guesses at tokens that steps have verified",
        "COUNTER",
        "outcome",
        {
            "accepted": lambda s: s.counters.accepted_draft_tokens_total,
            "rejected": lambda s: s.counters.draft_tokens_total - s.counters.accepted_draft_tokens_total,
        },
    ),
    MetricFamily("everbatch_steps_total", "Engine steps", "COUNTER", "", {"": lambda s: s.counters.steps_total}),
    MetricFamily("everbatch_sessions", "Sessions known", "GAUGE", "", {"": lambda s: s.latest.num_sessions}),
)

_INFLIGHT = MetricFamily(
    "nv_trt_llm_inflight_batcher_metrics",
    "TRT LLM inflight_batcher-specific metrics",
    "GAUGE",
    "inflight_batcher_specific_metric",
    {
        "total_context_tokens": lambda s: s.latest.num_ctx_tokens,
        "generation_requests": lambda s: s.latest.num_gen_requests,
        "micro_batch_id": lambda s: s.latest.micro_batch_id,
        "paused_requests": lambda s: s.latest.num_paused_requests,
    },
    ("Total Context Tokens", "Generation Requests", "MicroBatch ID", "Paused Requests"),
)

_STATIC = MetricFamily(
    "nv_trt_llm_v1_metrics",
    "TRT LLM v1-specific metrics",
    "GAUGE",
    "v1_specific_metric",
    {
        "total_context_tokens": lambda s: s.latest.num_ctx_tokens,
        "total_generation_tokens": lambda s: s.latest.num_gen_requests,  # each gets one token in a step
        "empty_generation_slots": lambda s: s.latest.num_empty_gen_slots,
    },
    ("Total Context Tokens", "Total Generation Tokens", "Empty Generation Slots"),
)


def _trt_llm(is_static: bool) -> tuple[MetricFamily, ...]:
    return (*_TRT_LLM, _STATIC if is_static else _INFLIGHT)


def engine_families(is_static: bool) -> tuple[MetricFamily, ...]:
    """All families of an engine; those of its batches differ where they are static."""
    return _trt_llm(is_static) + _OURS


def statistics_line(stats: EngineStats, is_static: bool = False) -> str:
    """TensorRT-LLM's statistics as one line of JSON: each value of its metric families, under its name there."""
    values = {
        name: read(stats)
        for family in _trt_llm(is_static)
        for name, read in zip(family.stats, family.values.values(), strict=True)
    }
    seconds, microseconds = divmod(stats.latest.timestamp_ns // 1000, 1_000_000)
    moment = datetime.fromtimestamp(seconds).replace(microsecond=microseconds)  # its tools expect the local time
    return msgspec.json.encode({**values, TIMESTAMP: moment.strftime("%m-%d-%Y %H:%M:%S.%f")}).decode()
