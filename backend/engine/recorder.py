"""Recorder: keeps statistics of single steps for clients that read them step by step; KvEventSink takes the KV events of steps.

Neither has any influence on the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from backend.api.config.schema import RecordsConfig
from backend.api.stats import (
    BlocksStored,
    DebugTensors,
    IterationRequests,
    IterationStats,
    KvEvent,
    Records,
    RequestStage,
    RequestStats,
)
from backend.core.sequence import Sequence, Status
from backend.core.step import StepOutput
from backend.engine.steps_in_flight import StepInFlight
from backend.kvcache.manager import KVCacheManager


class Recorder:
    """Keeps records until the loop takes them, after every step. Beyond the bounds the oldest are dropped."""

    def __init__(self, config: RecordsConfig, kv: KVCacheManager, kv_events: KvEventSink | None = None) -> None:
        """`kv_events`: gets all events of the cache, which records hold only as far as they are asked for."""
        self._kv, self._kv_events = kv, kv_events
        if kv_events is not None:
            kv_events.start(kv.block_size)
        self._iterations: deque[IterationStats] = deque(maxlen=config.max_iterations)
        self._requests: deque[IterationRequests] = deque(maxlen=config.max_request_iterations)
        self._debug_tensors: deque[DebugTensors] = deque(maxlen=config.max_debug_iterations)
        self._ended: list[RequestStats] = []
        self._max_kv_events = config.max_kv_events
        self._wants_requests = config.max_request_iterations > 0
        self.wants_steps = config.max_iterations > 0 or self._wants_requests or config.max_debug_iterations > 0

    def note_end(self, seq: Sequence) -> None:
        """Note that a request has ended. Call it before its counters are reset."""
        if self._wants_requests:
            self._ended.append(_request_stats(seq, RequestStage.COMPLETE))

    def record(
        self,
        flight: StepInFlight,
        latest: IterationStats,
        live: Iterable[Sequence],
        output: StepOutput | None = None,
    ) -> None:
        """Record a landed step. `latest`: its statistics; `live`: the requests that go on; `output`: None if it failed."""
        if output is not None and output.debug_tensors:
            self._debug_tensors.append(DebugTensors(latest.iter, output.debug_tensors))
        if self._iterations.maxlen:
            new = [seq for seq in flight.plan.admitted if seq.first_scheduled_ns == flight.started_ns]
            waited_ns = sum(flight.started_ns - seq.arrival_ns for seq in new)
            self._iterations.append(
                msgspec.structs.replace(
                    latest, num_new_active_requests=len(new), new_active_requests_queue_latency_ms=waited_ns / 1e6
                )
            )
        if self._wants_requests:
            scheduled = {seq.seq_id for seq, _ in flight.plan.rows}
            requests = [_request_stats(seq, _stage(seq), seq.seq_id in scheduled) for seq in live]
            self._requests.append(IterationRequests(latest.iter, [*requests, *self._ended]))
            self._ended = []

    def take(self) -> Records | None:
        """Return the records since the last call; None if there are none."""
        kv_events = self._kv.take_events()
        if kv_events and self._kv_events is not None:
            self._kv_events.offer(kv_events, self._kv.cached_prefixes)
        kv_events = kv_events[-self._max_kv_events :] if self._max_kv_events else []
        if not (self._iterations or self._requests or kv_events or self._debug_tensors):
            return None
        records = Records(list(self._iterations), list(self._requests), kv_events, list(self._debug_tensors))
        self._iterations.clear()
        self._requests.clear()
        self._debug_tensors.clear()
        return records

    def close(self) -> None:
        """No more events will come."""
        if self._kv_events is not None:
            self._kv_events.close()


def _stage(seq: Sequence) -> RequestStage:
    if seq.status is not Status.RUNNING:
        return RequestStage.QUEUED
    return RequestStage.GENERATION if seq.num_output_tokens else RequestStage.CONTEXT


def _request_stats(seq: Sequence, stage: RequestStage, is_scheduled: bool = False) -> RequestStats:
    return RequestStats(
        seq.request_id,
        stage,
        min(seq.num_computed_tokens, seq.num_prompt_tokens),
        seq.num_output_tokens,
        is_scheduled,
        seq.status is Status.PAUSED,
        seq.num_new_blocks,
        seq.num_reused_blocks,
        seq.num_output_tokens - seq.num_extra_tokens,
    )


class KvEventSink(Protocol):
    """Where an engine's KV events go besides the programs that ask for them. The engine's thread calls it; no method waits."""

    def start(self, block_size: int) -> None:
        """The pool was made. `block_size`: tokens of a block."""
        ...

    def offer(self, events: list[KvEvent], cached: Callable[[], list[BlocksStored]]) -> None:
        """At least one event, in order. `cached` returns what can be found behind these events; it costs as much as that is."""
        ...

    def close(self) -> None:
        """No more events will come. Safe to call twice."""
        ...
