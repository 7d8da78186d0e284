"""Statistics of several replicas as one engine's."""

from __future__ import annotations

from backend.api.stats import EngineCounters, EngineStats, IterationStats, KvCacheStats
from backend.replicas.totals import total_stats


def test_counts_are_added_and_times_are_not() -> None:
    first = EngineStats(
        IterationStats(
            iter=5, timestamp_ns=9, num_active_requests=2, kv_cache=KvCacheStats(100, 40, tokens_per_block=32)
        ),
        EngineCounters(prompt_tokens_total=10, requests_finished_total={"LENGTH": 3}),
        uptime_s=50.0,
        started_ns=7,
    )
    second = EngineStats(
        IterationStats(
            iter=8, timestamp_ns=4, num_active_requests=1, kv_cache=KvCacheStats(100, 60, tokens_per_block=32)
        ),
        EngineCounters(prompt_tokens_total=1, requests_finished_total={"LENGTH": 1, "END_ID": 2}),
        uptime_s=20.0,
        started_ns=11,
    )
    total = total_stats([first, second])
    assert (total.latest.iter, total.latest.timestamp_ns, total.latest.num_active_requests) == (8, 9, 3)
    kv = total.latest.kv_cache
    assert (kv.max_num_blocks, kv.free_num_blocks, kv.tokens_per_block) == (200, 100, 32)
    assert total.counters.prompt_tokens_total == 11
    assert total.counters.requests_finished_total == {"LENGTH": 4, "END_ID": 2}
    assert (total.uptime_s, total.started_ns) == (20.0, 11)


def test_one_replica_is_itself() -> None:
    stats = EngineStats(IterationStats(iter=3, iter_latency_ms=2.5), EngineCounters(steps_total=4), 1.5, 6)
    assert total_stats([stats]) == stats
