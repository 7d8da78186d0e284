"""The engine's responses and statistics, as records of the bindings."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from backend.api import PerfMetrics
from backend.api import response as core
from backend.api import stats as core_stats
from backend.api.tensor import TensorData
from backend.core import kv_state
from backend.core.messages import Hello
from backend.core.step import ModelInfo
from compat.tensorrt_llm import as_tensor
from compat.trtllm import kv_cache
from compat.trtllm.enums import FinishReason, RequestStage
from compat.trtllm.request_configs import ContextPhaseParams
from compat.trtllm.results import (
    AdditionalOutput,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)
from compat.trtllm.statistics import (
    DebugTensorsPerIteration,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    StaticBatchingStats,
)

TIMESTAMP = "%m-%d-%Y %H:%M:%S.%f"
_REASONS = {reason: FinishReason(int(reason)) for reason in core.FinishReason}
_STAGES = {
    core_stats.RequestStage.QUEUED: RequestStage.QUEUED,
    core_stats.RequestStage.CONTEXT: RequestStage.CONTEXT_IN_PROGRESS,
    core_stats.RequestStage.GENERATION: RequestStage.GENERATION_IN_PROGRESS,
    core_stats.RequestStage.COMPLETE: RequestStage.GENERATION_COMPLETE,
}

# Attributes with the same name and meaning on both sides.
_RESULT = ("is_final", "is_sequence_final", "sequence_index", "cum_log_probs", "log_probs", "decoding_iter")
_ITERATION = (
    "iter",
    "iter_latency_ms",
    "new_active_requests_queue_latency_ms",
    "num_new_active_requests",
    "num_active_requests",
    "num_queued_requests",
    "num_completed_requests",
    "max_num_active_requests",
)
_INFLIGHT = (
    "num_scheduled_requests",
    "num_context_requests",
    "num_gen_requests",
    "num_paused_requests",
    "num_ctx_tokens",
    "micro_batch_id",
)


def response(answer: core.Response) -> Response:
    if answer.has_error():
        return Response(answer.request_id, answer.error_msg, answer.client_id)
    return Response(answer.request_id, result(answer.result, answer.request_id), answer.client_id)


def result(given: core.Result, request_id: int = 0) -> Result:
    return Result(
        output_token_ids=given.output_token_ids,
        finish_reasons=[_REASONS[reason] for reason in given.finish_reasons],
        avg_decoded_tokens_per_iter=1.0,
        context_logits=_tensor(given.context_logits),
        generation_logits=_tensor(given.generation_logits),
        additional_outputs=_additional(given),
        request_perf_metrics=_perf_metrics(given),
        context_phase_params=None if given.kv_state is None else _context_phase(given.kv_state, request_id),
        **{name: getattr(given, name) for name in _RESULT},
    )


def _context_phase(state: bytes, request_id: int) -> ContextPhaseParams:
    return ContextPhaseParams(kv_state.decode(state, len(state)).first_token_ids, request_id, state)


def debug_tensors(given: core_stats.DebugTensors) -> DebugTensorsPerIteration:
    return DebugTensorsPerIteration(
        iter=given.iter, debug_tensors={name: as_tensor(each) for name, each in given.tensors.items()}
    )


def _tensor(given: TensorData | None) -> Any:
    return None if given is None else as_tensor(given)


def _additional(given: core.Result) -> list[AdditionalOutput]:
    """Tensors by name: rows of the output under the name that was asked for, rows of the prompt under `context_NAME`."""
    context = {f"context_{name}": each for name, each in (given.additional_context_outputs or {}).items()}
    return [
        AdditionalOutput(name, as_tensor(each))
        for name, each in {**(given.additional_outputs or {}), **context}.items()
    ]


def _perf_metrics(given: core.Result) -> RequestPerfMetrics | None:
    if given.perf_metrics is None:
        return None
    return perf_metrics(given.perf_metrics, given.decoding_iter, given.is_sequence_final)


def perf_metrics(given: PerfMetrics, iteration: int, is_last: bool) -> RequestPerfMetrics:
    """Metrics in TensorRT-LLM's way: a block that began as a copy counts as reused, and as allocated."""
    new, reused = given.num_new_blocks - given.num_copied_blocks, given.num_reused_blocks + given.num_copied_blocks
    return RequestPerfMetrics(
        TimingMetrics(
            _span(given.arrival_ns),
            _span(given.first_scheduled_ns),
            _span(given.first_token_ns),
            _span(given.last_token_ns),
        ),
        KvCacheMetrics(given.num_new_blocks, new, reused, new, hit_rate(reused, new)),
        SpeculativeDecodingMetrics(given.acceptance_rate, given.num_accepted_draft_tokens, given.num_draft_tokens),
        first_iter=given.first_iteration,
        last_iter=iteration if is_last else None,
        iter=iteration,
    )


def hit_rate(reused: int, missed: int) -> float:
    return reused / (reused + missed) if reused + missed else 0.0


def _span(ns: int) -> timedelta:
    return timedelta(microseconds=ns / 1000)


def timestamp(ns: int) -> str:
    """Local time in the format of TensorRT-LLM."""
    return datetime.fromtimestamp(ns / 1e9, UTC).astimezone().strftime(TIMESTAMP)


def iteration_stats(
    given: core_stats.IterationStats, hello: Hello, newest: core_stats.IterationStats
) -> IterationStats:
    """The statistics of an iteration. `gpu_mem_usage` is memory of the device that runs the model, on a CPU of the process.

    Memory is not measured in each step: the figures are from the `newest` statistics, which the engine sends about once a second.
    """
    in_use = newest.gpu_memory_bytes if hello.model.device != "cpu" else newest.cpu_memory_bytes
    is_static = hello.config.scheduler.batching == "static"
    return IterationStats(
        timestamp(given.timestamp_ns),
        gpu_mem_usage=in_use,
        cpu_mem_usage=newest.cpu_memory_bytes,
        kv_cache_stats=_kv_cache_stats(given.kv_cache),
        static_batching_stats=_static(given) if is_static else None,
        inflight_batching_stats=None if is_static else _inflight(given),
        **{name: getattr(given, name) for name in _ITERATION},
    )


def _inflight(given: core_stats.IterationStats) -> InflightBatchingStats:
    return InflightBatchingStats(
        **{name: getattr(given, name) for name in _INFLIGHT}, avg_num_decoded_tokens_per_iter=given.tokens_per_row
    )


def _static(given: core_stats.IterationStats) -> StaticBatchingStats:
    return StaticBatchingStats(
        given.num_scheduled_requests,
        given.num_context_requests,
        given.num_ctx_tokens,
        given.num_gen_tokens,
        given.num_empty_gen_slots,
    )


def _kv_cache_stats(given: core_stats.KvCacheStats) -> KvCacheStats:
    new, reused, missed = given.alloc_new_blocks_total, given.reused_blocks_total, given.missed_blocks_total
    return KvCacheStats(
        max_num_blocks=given.max_num_blocks,
        free_num_blocks=given.max_num_blocks - given.used_num_blocks,
        used_num_blocks=given.used_num_blocks,
        tokens_per_block=given.tokens_per_block,
        alloc_total_blocks=new,
        alloc_new_blocks=new,
        reused_blocks=reused,
        missed_blocks=missed,
        cache_hit_rate=hit_rate(reused, missed),
    )


def request_stats(given: core_stats.IterationRequests) -> RequestStatsPerIteration:
    return RequestStatsPerIteration(given.iter, [_one_request(each) for each in given.requests])


def _one_request(given: core_stats.RequestStats) -> RequestStats:
    new, reused = given.num_new_blocks, given.num_reused_blocks
    return RequestStats(
        id=given.request_id,
        stage=_STAGES[given.stage],
        context_prefill_position=given.num_computed_tokens,
        num_generated_tokens=given.num_output_tokens,
        avg_num_decoded_tokens_per_iter=given.tokens_per_step,
        scheduled=given.is_scheduled,
        paused=given.is_paused,
        alloc_total_blocks_per_request=new,
        alloc_new_blocks_per_request=new,
        reused_blocks_per_request=reused,
        missed_blocks_per_request=new,
        kv_cache_hit_rate_per_request=hit_rate(reused, new),
    )


def kv_event(given: core_stats.KvEvent, model: ModelInfo) -> kv_cache.KVCacheEvent:
    return kv_cache.KVCacheEvent(given.event_id, _event_data(given.data), model.sliding_window or model.max_seq_len)


def _event_data(
    data: core_stats.BlocksCreated | core_stats.BlocksStored | core_stats.BlocksRemoved | core_stats.BlockUpdated,
) -> kv_cache.EventData:
    if isinstance(data, core_stats.BlocksCreated):
        return kv_cache.KVCacheCreatedData([data.num_blocks, 0])
    if isinstance(data, core_stats.BlocksRemoved):
        return kv_cache.KVCacheRemovedData(data.block_hashes)
    if isinstance(data, core_stats.BlockUpdated):
        return kv_cache.KVCacheUpdatedData(data.block_hash, priority=kv_cache.KVCacheEventDiffInt(None, data.priority))
    blocks = [
        kv_cache.KVCacheStoredBlockData(
            block.block_hash, [kv_cache.UniqueToken(token) for token in block.token_ids], data.origin.lora_id
        )
        for block in data.blocks
    ]
    return kv_cache.KVCacheStoredData(data.parent_hash, blocks)
