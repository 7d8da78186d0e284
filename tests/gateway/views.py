"""Views of an engine, as the model `everbatch` answers them to a look."""

from __future__ import annotations

from typing import Any

import msgspec

from backend.api.live_view import CACHED, FREE, LiveRow, LiveSession, LiveView, Quantiles
from backend.api.stats import EngineCounters, IterationStats, KvCacheStats


def view(
    *, engine: str = "e1", cached: int = 4, evicted: int = 0, output: int = 10, uptime_s: float = 5.0
) -> dict[str, Any]:
    """One row that runs in 4 of 16 blocks, one that waits, a session at rest in 2 blocks, `cached` blocks for anybody."""
    cache = KvCacheStats(16, 10 - cached, cached + 2, 4, 32, 16, evicted_blocks_total=evicted)
    row = LiveRow("aaaa0001", "generation", 40, 50, output, 100, 4, 8, num_recomputed_tokens=3, age_s=1.5)
    waiting = LiveRow("bbbb0002", "queued", 70, 0, 0, 50)
    found = LiveView(
        engine=engine,
        time_ns=1,
        uptime_s=uptime_s,
        latest=IterationStats(iter=7, max_num_active_requests=8, iter_latency_ms=10.0, num_ctx_tokens=50, kv_cache=cache),
        counters=EngineCounters(generated_tokens_total=output, context_tokens_total=60, cached_tokens_total=20,
                                sequences_evicted_total=evicted),
        first_token_s=Quantiles(0.02, 0.03, 0.04),
        per_token_s=Quantiles(0.004, 0.005, 0.006),
        rows=[row],
        queue=[waiting],
        num_queued=1,
        sessions=[LiveSession("cccc0003", 100, 60)],
        num_sessions=1,
        blocks=[0, 4, 1, 2, CACHED, cached, FREE, 10 - cached],
        blocks_per_cell=1,
        num_blocks=16,
    )  # fmt: skip
    built: dict[str, Any] = msgspec.to_builtins(found)
    return built
