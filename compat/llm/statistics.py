"""IterationResult: statistics of the engine's iterations, as a list or as an asynchronous iterator, with a timeout."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Any

from msgspec import Struct

from backend.api import IterationStats
from backend.api.stats import BlocksCreated, BlocksRemoved, BlocksStored, IterationRequests, KvEvent

LOOK_S = 0.02  # interval at which a waiter looks for new records


class LatestStats(Struct, frozen=True):
    """The state after the newest step that the engine has reported."""

    num_active_requests: int = 0  # accepted and not finished
    num_queued_requests: int = 0  # waiting for their first admission
    current_batch_size: int = 0  # rows of the step


class IterationResult:
    """Hands out each record once. `take` returns the records since its last call."""

    def __init__(self, take: Callable[[], list[dict[str, Any]]], timeout: float = 2.0) -> None:
        """`timeout`: seconds to wait for the next record before the end."""
        self._take = take
        self._timeout = timeout
        self._records: deque[dict[str, Any]] = deque()

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def get_results(self) -> list[dict[str, Any]]:
        """Wait for a record, and return all records that have come; [] after the timeout."""
        end = time.monotonic() + self._timeout
        while not self._look() and time.monotonic() < end:
            time.sleep(LOOK_S)
        records = list(self._records)
        self._records.clear()
        return records

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        end = time.monotonic() + self._timeout
        while not self._look() and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        if not self._records:
            raise StopAsyncIteration
        return self._records.popleft()

    def _look(self) -> bool:
        self._records.extend(self._take())
        return bool(self._records)


def as_json(stats: IterationStats) -> dict[str, Any]:
    """One record under the names of TensorRT-LLM's JSON."""
    kv = stats.kv_cache
    total = kv.reused_blocks_total + kv.missed_blocks_total
    return {
        "timestamp": datetime.fromtimestamp(stats.timestamp_ns / 1e9).strftime("%m-%d-%Y %H:%M:%S.%f"),
        "iter": stats.iter,
        "iterLatencyMS": stats.iter_latency_ms,
        "newActiveRequestsQueueLatencyMS": stats.new_active_requests_queue_latency_ms,
        "numNewActiveRequests": stats.num_new_active_requests,
        "numActiveRequests": stats.num_active_requests,
        "numQueuedRequests": stats.num_queued_requests,
        "numCompletedRequests": stats.num_completed_requests,
        "maxNumActiveRequests": stats.max_num_active_requests,
        "gpuMemUsage": stats.gpu_memory_bytes,
        "cpuMemUsage": stats.cpu_memory_bytes,
        "pinnedMemUsage": 0,
        "kvCacheStats": {
            "maxNumBlocks": kv.max_num_blocks,
            "freeNumBlocks": kv.free_num_blocks + kv.cached_num_blocks,
            "usedNumBlocks": kv.used_num_blocks,
            "tokensPerBlock": kv.tokens_per_block,
            "allocNewBlocks": kv.alloc_new_blocks_total,
            "reusedBlocks": kv.reused_blocks_total,
            "missedBlocks": kv.missed_blocks_total,
            "cacheHitRate": kv.reused_blocks_total / total if total else 0.0,
        },
        "staticBatchingStats": None,
        "inflightBatchingStats": {
            "numScheduledRequests": stats.num_scheduled_requests,
            "numContextRequests": stats.num_context_requests,
            "numGenRequests": stats.num_gen_requests,
            "numPausedRequests": stats.num_paused_requests,
            "numCtxTokens": stats.num_ctx_tokens,
            "microBatchId": stats.micro_batch_id,
            "avgNumDecodedTokensPerIter": stats.tokens_per_row,
        },
    }


def requests_as_json(iteration: IterationRequests) -> list[dict[str, Any]]:
    """The requests of one iteration under the names of TensorRT-LLM's JSON. `id` is the engine's own."""
    return [
        {
            "id": request.request_id,
            "stage": request.stage.name,
            "contextPrefillPosition": request.num_computed_tokens,
            "numGeneratedTokens": request.num_output_tokens,
            "avgNumDecodedTokensPerIter": request.tokens_per_step,
            "scheduled": request.is_scheduled,
            "paused": request.is_paused,
            "allocNewBlocksPerRequest": request.num_new_blocks,
            "reusedBlocksPerRequest": request.num_reused_blocks,
        }
        for request in iteration.requests
    ]


def event_as_json(event: KvEvent) -> dict[str, Any]:
    """A change of the KV cache in the form of TensorRT-LLM's LLM API. All blocks are on the device (level 0)."""
    return {"event_id": event.event_id, "data": _event_data(event)}


def _event_data(event: KvEvent) -> dict[str, Any]:
    data = event.data
    if isinstance(data, BlocksCreated):
        return {"type": "created", "num_blocks_per_cache_level": [data.num_blocks, 0]}
    if isinstance(data, BlocksStored):
        blocks = [
            {
                "type": "stored_block",
                "block_hash": block.block_hash,
                "tokens": [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in block.token_ids],
                "cache_level": 0,
            }
            for block in data.blocks
        ]
        return {"type": "stored", "parent_hash": data.parent_hash, "blocks": blocks}
    if isinstance(data, BlocksRemoved):
        return {"type": "removed", "block_hashes": data.block_hashes}
    return {"type": "updated", "block_hash": data.block_hash, "priority": data.priority}
