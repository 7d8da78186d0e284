"""The metric families that appear in Triton's /metrics, as data, and the publisher that sends changed values.

Families named `nv_trt_llm_*` and `nv_llm_*` have TensorRT-LLM's names, so that its dashboards work; those named
`everbatch_*` are this project's own. Each update of a value is a round trip to the server, so the housekeeper sends only the
values that have changed. TensorRT-LLM's families for runtime memory, disaggregated serving and static batching are not
published, because nothing here could fill them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from backend.api import EngineStats

TOKEN_BUCKETS = [10.0, 50.0, 100.0, 500.0, 1000.0]
FINISH_REASONS = ("END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED", "ERROR")

Read = Callable[[EngineStats], float]


class MetricHandle(Protocol):
    """The part of Triton's Metric that is used here."""

    def set(self, value: float) -> None: ...

    def increment(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class FamilyHandle(Protocol):
    """The part of Triton's MetricFamily that is used here."""

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> MetricHandle: ...


class Family(NamedTuple):
    """One metric family with its values."""

    name: str
    description: str
    kind: str  # GAUGE or COUNTER
    label: str  # the name of the label that tells the values apart; "" when the family has one value
    values: dict[str, Read]  # for each value of the label, the function that reads it from the statistics


def _scheduled(stats: EngineStats) -> int:
    """The requests of the last step that still run. An idle engine keeps the record of its last step, hence the minimum."""
    return min(stats.latest.num_scheduled_requests, stats.latest.num_active_requests)


def _finished_with(reason: str) -> Read:
    return lambda stats: stats.counters.requests_finished_total.get(reason, 0)


_TRT_LLM = (
    Family(
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
    ),
    Family(
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
    ),
    Family(
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
    ),
    Family(
        "nv_trt_llm_general_metrics",
        "General TRT LLM metrics",
        "GAUGE",
        "general_type",
        {"timestamp": lambda s: s.latest.timestamp_ns // 1000, "iteration_counter": lambda s: s.latest.iter},
    ),
)

_OURS = (
    Family(
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
    Family(
        "everbatch_kv_blocks_total",
        "KV cache blocks handled since the engine started, by what happened to them",
        "COUNTER",
        "event",
        {
            "new": lambda s: s.latest.kv_cache.alloc_new_blocks_total,
            "reused": lambda s: s.latest.kv_cache.reused_blocks_total,
            "missed": lambda s: s.latest.kv_cache.missed_blocks_total,
            "evicted": lambda s: s.latest.kv_cache.evicted_blocks_total,
        },
    ),
    Family(
        "everbatch_tokens_total",
        "Tokens since the engine started: prompt = sent by clients, context = run through the context phase, cached = "
        "not run because their KV was found, recomputed = run again because their KV had been evicted, generated",
        "COUNTER",
        "kind",
        {
            "prompt": lambda s: s.counters.prompt_tokens_total,
            "context": lambda s: s.counters.context_tokens_total,
            "cached": lambda s: s.counters.cached_tokens_total,
            "recomputed": lambda s: s.counters.recomputed_tokens_total,
            "generated": lambda s: s.counters.generated_tokens_total,
        },
    ),
    Family(
        "everbatch_evictions_total",
        "Returning sequences that found KV of theirs gone and were recomputed",
        "COUNTER",
        "",
        {"": lambda s: s.counters.sequences_evicted_total},
    ),
    Family(
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
    Family(
        "everbatch_requests_finished_total",
        "Requests that ended, by reason",
        "COUNTER",
        "reason",
        {reason.lower(): _finished_with(reason) for reason in FINISH_REASONS},
    ),
    Family(
        "everbatch_requests_rejected_total",
        "Requests that were refused",
        "COUNTER",
        "",
        {"": lambda s: s.counters.requests_rejected_total},
    ),
    Family(
        "everbatch_pauses_total",
        "Sequences taken off the batch",
        "COUNTER",
        "",
        {"": lambda s: s.counters.pauses_total},
    ),
    Family("everbatch_steps_total", "Engine steps", "COUNTER", "", {"": lambda s: s.counters.steps_total}),
    Family("everbatch_sessions", "Sessions known", "GAUGE", "", {"": lambda s: s.latest.num_sessions}),
)

ENGINE_FAMILIES = _TRT_LLM + _OURS


class MetricsPublisher:
    """Sends metrics to Triton. After its construction only one thread may use it."""

    def __init__(
        self, new_family: Callable[[str, str, str], FamilyHandle], labels: dict[str, str], engine: bool
    ) -> None:
        """Register the families with Triton.

        `new_family(name, description, kind)` makes a family. `labels` name the model and its version. With `engine` the
        engine's families are published too, which exactly one model of a server does.
        """
        self._labels = labels
        self._families: list[FamilyHandle] = []  # Triton drops a family with its last reference, so they are kept here
        self._sent: dict[tuple[str, str], float] = {}
        self._metrics: dict[tuple[str, str], MetricHandle] = {}
        for family in ENGINE_FAMILIES if engine else ():
            handle = self._keep(new_family(family.name, family.description, family.kind))
            for value in family.values:
                extra = {family.label: value} if family.label else {}
                self._metrics[family.name, value] = handle.Metric(labels={**labels, **extra})
        self._ready: MetricHandle | None = None
        if engine:
            ready = self._keep(new_family("everbatch_engine_ready", "1 while the engine answers, else 0", "GAUGE"))
            self._ready = ready.Metric(labels=labels)
        self._lengths = [
            self._keep(new_family(name, "TRT LLM response metrics", "HISTOGRAM")).Metric(
                labels={**labels, "response_metric_type": kind}, buckets=TOKEN_BUCKETS
            )
            for name, kind in (
                ("nv_llm_input_token_len", "total_input_tokens"),
                ("nv_llm_output_token_len", "total_output_tokens"),
            )
        ]

    def publish_engine(self, stats: EngineStats | None, ready: bool) -> None:
        """Send the values of the engine that have changed since the last call."""
        if self._ready is not None and self._sent.get(("ready", "")) != ready:
            self._ready.set(float(ready))
            self._sent["ready", ""] = ready
        if stats is None:
            return
        for family in ENGINE_FAMILIES:
            for label, read in family.values.items():
                self._send(family, label, float(read(stats)))

    def publish_lengths(self, finished: Iterable[tuple[int, int]]) -> None:
        """Send the lengths of rows that have ended since the last call, each as (prompt tokens, output tokens)."""
        for lengths in finished:
            for metric, tokens in zip(self._lengths, lengths):
                metric.observe(float(tokens))

    def _send(self, family: Family, label: str, value: float) -> None:
        key = (family.name, label)
        before = self._sent.get(key)
        if value == before:
            return
        if family.kind == "GAUGE":
            self._metrics[key].set(value)
        else:  # a smaller value means a new engine process, which counts from 0 again
            growth = value - before if before is not None and value >= before else value
            self._metrics[key].increment(growth)
        self._sent[key] = value

    def _keep(self, family: FamilyHandle) -> FamilyHandle:
        self._families.append(family)
        return family
