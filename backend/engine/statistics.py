"""Statistics: totals of the engine and figures of its latest step. They have no influence on the engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from backend.api.distributions import Distributions
from backend.api.stats import (
    EngineCounters,
    EngineStats,
    ImageStats,
    IterationStats,
    KvCacheStats,
    SecondLevelStats,
    SnapshotStats,
)
from backend.core.clock import Clock
from backend.core.sequence import Sequence
from backend.core.step import MemoryUse
from backend.engine.distributions import note_sequence
from backend.engine.steps_in_flight import StepInFlight, StepRecord
from backend.kvcache.manager import KVCacheManager
from backend.scheduler.scheduler import Scheduler

RECENT = 512  # requests


class Gauges(msgspec.Struct, frozen=True):
    """Figures of the present state, with the names of IterationStats."""

    num_active_requests: int
    num_queued_requests: int
    num_preparing_requests: int
    num_running_sequences: int
    num_paused_requests: int
    max_num_active_requests: int
    num_sessions: int
    kv_cache: KvCacheStats
    second_level: SecondLevelStats
    snapshots: SnapshotStats
    images: ImageStats


def gauges(
    num_live: int,
    num_preparing: int,
    scheduler: Scheduler,
    num_sessions: int,
    kv: KVCacheManager,
    second_level: SecondLevelStats,
    images: ImageStats,
) -> Gauges:
    """`num_live`: requests accepted and not finished; `num_preparing` of them wait for a guide or an adapter."""
    waiting = scheduler.waiting
    return Gauges(
        num_active_requests=num_live,
        num_queued_requests=len(waiting) - waiting.num_paused,
        num_preparing_requests=num_preparing,
        num_running_sequences=len(scheduler.running),
        num_paused_requests=waiting.num_paused,
        max_num_active_requests=kv.num_slots,
        num_sessions=num_sessions,
        kv_cache=kv.stats(),
        second_level=second_level,
        snapshots=SnapshotStats() if kv.states is None else kv.states.stats(),
        images=images,
    )


class Statistics:
    def __init__(self, clock: Clock) -> None:
        self.counters = EngineCounters()
        self.distributions = Distributions()
        self.iteration = 0  # the number of steps that have landed
        self._clock = clock
        self._started_ns = clock.monotonic_ns()
        self._latest: StepRecord | None = None
        self._num_completed = 0  # requests that have ended since the latest recorded step
        self._memory = MemoryUse()
        self.first_token_s: deque[float] = deque(
            maxlen=RECENT
        )  # seconds from arrival to the first token, of the latest requests that have ended
        self.per_token_s: deque[float] = deque(maxlen=RECENT)  # between two output tokens of a request, on average
        self._memory_at = -1  # the value of `iteration` at which it was measured

    def count_accepted(self, num_prompt_tokens: int) -> None:
        """Count a request that is queued."""
        self.counters.requests_accepted_total += 1
        self.counters.prompt_tokens_total += num_prompt_tokens

    def count_end(self, reason: str, seq: Sequence | None = None) -> None:
        """Count the end of a request; with its sequence, the times that its client has waited."""
        self._num_completed += 1
        if seq is not None and seq.first_token_ns:
            self.first_token_s.append((seq.first_token_ns - seq.arrival_ns) / 1e9)
            if seq.num_output_tokens > 1:
                generation_ns = seq.last_token_ns - seq.first_token_ns
                self.per_token_s.append(generation_ns / 1e9 / (seq.num_output_tokens - 1))
        totals = self.counters.requests_finished_total
        totals[reason] = totals.get(reason, 0) + 1

    def count_sequence(self, seq: Sequence) -> None:
        """Count the end of a sequence, once it has left its group."""
        note_sequence(self.distributions, seq, self._clock.monotonic_ns())

    def count_unqueued(self, reason: str) -> None:
        """Count a request that ended before it was queued. It counts as accepted too."""
        self.counters.requests_accepted_total += 1
        self.count_end(reason)

    def record(self, flight: StepInFlight) -> float:
        """Record a landed step, and return its duration in seconds.

        The duration counts from the end of the step before, if this one was submitted earlier."""
        plan, counters = flight.plan, self.counters
        before_ns = self._latest.ended_ns if self._latest is not None else 0
        counters.steps_total += 1
        counters.pauses_total += len(plan.paused)
        counters.cached_tokens_total += plan.num_cached_tokens
        counters.queried_tokens_total += plan.num_queried_tokens
        counters.sequences_evicted_total += plan.num_evicted
        counters.recomputed_tokens_total += plan.num_lost_tokens
        self._latest = StepRecord(
            flight.step.step_id,
            max(flight.started_ns, before_ns),
            self._clock.monotonic_ns(),
            self._num_completed,
            len(plan.generation),
            len(plan.context),
            sum(num_tokens for _, num_tokens in plan.context),
            plan.num_empty_slots,
            len(plan.generation) if flight.num_decoded_tokens is None else flight.num_decoded_tokens,
            flight.micro_batch,
        )
        latest = self._latest
        if num_tokens := latest.num_context_tokens + latest.num_decoded_tokens:
            self.distributions.add("step_tokens", num_tokens)
        self._num_completed = 0
        self.iteration = flight.step.step_id + 1
        return (latest.ended_ns - latest.started_ns) / 1e9

    def snapshot(
        self, gauges: Gauges, scheduler: Scheduler, has_work: bool, memory_use: Callable[[], MemoryUse]
    ) -> EngineStats:
        """All statistics. Figures of the latest step are included only while there is work.

        Memory is measured only after a new step, so that two snapshots of an idle engine are equal.
        """
        if self._memory_at != self.iteration:
            self._memory, self._memory_at = memory_use(), self.iteration
        latest = self.latest_iteration(gauges)
        if not has_work:
            latest = _with_gauges(IterationStats(iter=latest.iter, timestamp_ns=latest.timestamp_ns), gauges)
        memory = self._memory
        latest = msgspec.structs.replace(latest, cpu_memory_bytes=memory.cpu_bytes, gpu_memory_bytes=memory.gpu_bytes)
        totals = dict(self.counters.requests_finished_total)
        counters = msgspec.structs.replace(self.counters, requests_finished_total=totals)
        uptime_s = (self._clock.monotonic_ns() - self._started_ns) / 1e9
        running, waiting = _adapters(scheduler.running), _adapters(scheduler.waiting)
        distributions = self.distributions.copy()
        return EngineStats(latest, counters, uptime_s, self._started_ns, distributions, running, waiting)

    def latest_iteration(self, gauges: Gauges) -> IterationStats:
        """Statistics of the latest step, with gauges of the present state."""
        latest = IterationStats() if self._latest is None else self._latest.statistics(self._clock)
        return _with_gauges(latest, gauges)


def _adapters(sequences: Iterable[Sequence]) -> dict[str, int]:
    origins = (seq.kv_origin for seq in sequences if seq.adapter)
    return dict(Counter(origin.lora_name or str(origin.lora_id) for origin in origins))


def _with_gauges(latest: IterationStats, gauges: Gauges) -> IterationStats:
    return msgspec.structs.replace(latest, **msgspec.structs.asdict(gauges))
