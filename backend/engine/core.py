"""EngineCore: owns every Sequence, and runs the persistent batch one step at a time.

    schedule -> execute -> sample -> update -> publish          (execute and sample are the WorkerGroup's)

    one step at a time      schedule 1, submit 1, collect 1, update 1      schedule 2, submit 2, collect 2, update 2
    looking ahead           schedule 1, submit 1      schedule 2, submit 2, collect 1, update 1      schedule 3, submit 3, ...

Looking ahead, the host's work is done while the device is busy. A sequence that ends is then found out one step late: its row
in the step in flight is dropped when that lands. A plan that needs to know what is in flight (StepPlan.must_wait) is dropped.

Commands (enqueue, cancel, stop_session) are applied between steps. Each accepted request gets exactly one final response; a
failed command gets an error response. Not thread-safe: one thread drives it.
"""

from __future__ import annotations

import heapq
import logging

import msgspec

from backend.api.config import EngineConfig
from backend.api.errors import EverbatchError, InvalidRequest, SessionError, SessionStatus
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import FinishReason, Response
from backend.api.stats import EngineCounters, EngineStats, IterationStats
from backend.core.clock import Clock, SystemClock
from backend.core.sequence import Event, Sequence, Status
from backend.core.step import SampledToken, StepOutput, WorkerGroup, WorkersLost
from backend.engine import publish, update
from backend.engine.flight import Flight, StepRecord, check_samples
from backend.engine.intake import Intake, never_fits
from backend.engine.pool import num_pool_blocks
from backend.engine.sessions import SessionTable
from backend.kvcache.manager import KVCacheManager
from backend.scheduler.scheduler import Scheduler, StepPlan

log = logging.getLogger("everbatch.engine")


class WorkerFailure(EverbatchError):
    """A step could not be executed; it ends the requests that took part in it."""


class EngineCore:
    def __init__(self, config: EngineConfig, workers: WorkerGroup, clock: Clock | None = None):
        """Load the model, size the KV pool, prepare the persistent batch. Raises ConfigError."""
        self.config = config
        self.clock = clock or SystemClock()
        self.workers = workers
        self.model = workers.load()
        num_blocks = num_pool_blocks(config, self.model, workers.free_memory_bytes())
        self.kv = KVCacheManager(
            config.kv_cache,
            num_blocks,
            config.scheduler.max_batch_size,
            self.model.sliding_window,
            config.scheduler.max_num_tokens,
        )
        workers.initialize_kv_cache(num_blocks, config.kv_cache.block_size, self.kv.blocks.num_backed)
        self.scheduler = Scheduler(config.scheduler, self.kv, on_cpu=self.model.device == "cpu")
        self.sessions = SessionTable(config.sessions, erase=lambda seq: self.kv.release(seq, keep=False))
        self.intake = Intake(config.limits, self.model, self.kv, self.scheduler, self.sessions)
        self.counters = EngineCounters()
        self.iteration = 0  # steps that have landed; the number of the one that is landing
        self._num_launched = 0
        self._looks_ahead = self.model.looks_ahead
        self._in_flight: Flight | None = None
        self._latest: StepRecord | None = None
        self._live: dict[RequestId, Sequence] = {}
        self._deadlines: list[tuple[int, RequestId]] = []  # heap; entries of finished requests are skipped
        self._outbox: list[Response] = []
        self._num_completed = 0
        self._started_ns = self.clock.monotonic_ns()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    @property
    def num_live(self) -> int:
        """Requests accepted and not finished."""
        return len(self._live)

    def live_ids(self) -> list[RequestId]:
        """Their ids, in order of acceptance."""
        return list(self._live)

    def begin_poll(self) -> None:
        """The commands that follow, up to the next call, have arrived at the same moment."""
        self.intake.sessions_this_poll.clear()

    def enqueue(self, request_id: RequestId, request: Request) -> None:
        """Accept a request, or answer it with an error."""
        now_ns = self.clock.monotonic_ns()
        try:
            if request_id in self._live:
                raise InvalidRequest(
                    f"request id {request_id} is in use by a request that is still processed; choose another"
                )
            seq = self.intake.accept(request_id, request, now_ns)
        except EverbatchError as error:
            self.counters.requests_rejected_total += 1
            self._outbox.append(publish.error_response(request_id, request.client_id, error))
            return
        self._live[request_id] = seq
        heapq.heappush(self._deadlines, (seq.deadline_ns, request_id))
        self.counters.requests_accepted_total += 1
        self.counters.prompt_tokens_total += seq.num_prompt_tokens - seq.num_history_tokens

    def cancel(self, request_id: RequestId, keep_output_tokens: int | None = None) -> None:
        """End a request wherever it is; its blocks and slot are free at once. Unknown ids are ignored.

        `keep_output_tokens` cuts the log of a session behind that many output tokens of this turn.
        """
        seq = self._live.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.CANCELLED, keep_output_tokens)

    def stop_session(self, request_id: RequestId, session_id: SessionId, end: bool, namespace: str = "") -> None:
        """Interrupt the running turn of a session; `end` erases the session as well. Answered under `request_id`."""
        seq = self.sessions.get(session_id)
        try:
            if seq is None:
                raise SessionError(
                    SessionStatus.INVALID, f"session {session_id} is not known; there is nothing to stop"
                )
            if seq.status is Status.IDLE and not end:
                raise SessionError(
                    SessionStatus.INACTIVE, f"session {session_id} runs no turn; there is nothing to stop"
                )
        except SessionError as error:
            self._outbox.append(publish.error_response(request_id, None, error))
            return
        if seq.status is Status.IDLE:
            self.sessions.erase(session_id)
        else:
            seq.erase_when_finished = end
            self._finish(seq, FinishReason.CANCELLED)
        self._outbox.append(publish.empty_response(request_id))

    def step(self) -> list[Response]:
        """Run one iteration of the persistent batch and return the responses that became ready, in order."""
        started_ns = self.clock.monotonic_ns()
        self._expire(started_ns)
        landing = launched = self._launch(started_ns)
        if self._looks_ahead:
            landing, self._in_flight = self._in_flight, launched
        if landing is not None:
            self._land(landing)
        return self.take_responses()

    def take_responses(self) -> list[Response]:
        """Hand over what is ready, without a step; answers to commands are."""
        ready, self._outbox = self._outbox, []
        return ready

    def fail_all(self, error: EverbatchError) -> None:
        """Answer every live request with `error`; for shutdown and for failures of the whole engine."""
        for seq in list(self._live.values()):
            self._fail(seq, error)

    def expire(self) -> None:
        """End requests that are past their deadline, and sessions that nobody has used for long. Every step begins with it."""
        self._expire(self.clock.monotonic_ns())

    def _expire(self, now_ns: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, request_id = heapq.heappop(self._deadlines)
            seq = self._live.get(request_id)
            if seq is not None and seq.deadline_ns == deadline_ns:
                self._finish(seq, FinishReason.TIMED_OUT)
        self.sessions.expire(now_ns)

    def stats(self) -> EngineStats:
        """A snapshot. What the last step did is told only while there is work."""
        latest = self.latest_iteration()
        if not self.has_work:
            latest = self._gauges(IterationStats(iter=latest.iter, timestamp_ns=latest.timestamp_ns))
        totals = dict(self.counters.requests_finished_total)
        counters = msgspec.structs.replace(self.counters, requests_finished_total=totals)
        return EngineStats(latest, counters, (self.clock.monotonic_ns() - self._started_ns) / 1e9)

    def latest_iteration(self) -> IterationStats:
        """What the latest step did, with gauges of the present state."""
        return self._gauges(IterationStats() if self._latest is None else self._latest.statistics(self.clock))

    def check_integrity(self) -> None:
        """Raise AssertionError when cache, queues and live requests contradict each other."""
        self.kv.check_integrity(self.scheduler.running)
        queued = {seq.request_id for seq in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._live), f"queued or running {sorted(queued)} != live requests {sorted(self._live)}"
        for seq in self.scheduler.running:
            assert seq.status is Status.RUNNING and seq.slot is not None, f"{seq!r} is in the batch"
        for seq in self.scheduler.waiting:
            assert seq.status in (Status.WAITING, Status.PAUSED) and seq.slot is None, f"{seq!r} is in the queue"

    def _launch(self, started_ns: int) -> Flight | None:
        """Plan a step and submit it; None when there is nothing to run, or nothing before the step in flight has landed."""
        plan = self.scheduler.schedule()
        if plan.is_empty or (self._in_flight is not None and plan.must_wait):
            return None
        step = self.scheduler.commit(plan, self._num_launched, started_ns)
        flight = Flight(plan, step, started_ns)
        self._fail_rejected(plan)
        has_work = bool(step.rows or step.new_rows)
        if has_work or self._in_flight is None:
            self._num_launched += 1
        if not has_work:
            if self._in_flight is None:
                self._record(flight)
            return None
        try:
            self.workers.submit(step)
        except WorkersLost:
            raise
        except Exception as error:  # the workers' own failures are of any class; the engine must outlive them
            self._lose_steps([flight] if self._in_flight is None else [self._in_flight, flight], error)
            return None
        return flight

    def _land(self, flight: Flight) -> None:
        """Wait for a step and book what it did."""
        try:
            output = self.workers.collect()
            check_samples(flight.step, output)
        except WorkersLost:
            raise
        except Exception as error:
            self._lose_steps([flight] if self._in_flight is None else [flight, self._in_flight], error)
            return
        self.iteration = flight.step.step_id
        self._update(flight, output)
        self._record(flight)

    def _update(self, flight: Flight, output: StepOutput) -> None:
        plan, dropped, now_ns = flight.plan, flight.dropped, self.clock.monotonic_ns()
        samples = iter(output.sampled)
        for seq, sample in zip(plan.generation, samples):
            if dropped and seq.seq_id in dropped:
                continue
            update.advance_by_newest(seq)
            if seq.num_computed_tokens >= seq.kv_due_at:
                self.kv.advance(seq)
            self._append(seq, sample, now_ns)
        rows = flight.step.rows[len(plan.generation) :]
        for (seq, num_tokens), row in zip(plan.context, rows, strict=True):
            sample = next(samples) if row.samples else None
            if seq.seq_id in dropped:
                continue
            context, recomputed = update.advance(seq, num_tokens)
            self.counters.context_tokens_total += context
            self.counters.recomputed_tokens_total += recomputed
            self.kv.advance(seq)
            if sample is not None:
                self._append(seq, sample, now_ns)
            elif not seq.num_uncomputed_tokens + seq.num_inflight_tokens:
                self._judge(seq)  # asked for no output

    def _append(self, seq: Sequence, sample: SampledToken, now_ns: int) -> None:
        self.counters.generated_tokens_total += 1
        update.append_token(seq, sample, now_ns)
        self._judge(seq)

    def _judge(self, seq: Sequence) -> None:
        """End a sequence, or tell what is new of it."""
        reason = update.finish_reason(seq)
        if reason is not FinishReason.NOT_FINISHED:
            self._finish(seq, reason)
        elif seq.request.streaming:
            self._outbox.append(publish.result_response(seq, self.iteration))

    def _finish(self, seq: Sequence, reason: FinishReason, keep_output_tokens: int | None = None) -> None:
        """Take a sequence out, release what it holds, then answer: in this order, so that a final response means all is free."""
        seq.finish_reason = reason
        self._leave(seq)
        self._count_end(reason.name)
        self._outbox.append(publish.result_response(seq, self.iteration))
        self._settle(seq, keep_output_tokens)

    def _fail(self, seq: Sequence, error: EverbatchError) -> None:
        if seq.session_id is not None:
            error = SessionError(SessionStatus.FAIL, error.message, error.code)
        self._leave(seq)
        self._count_end("ERROR")
        self._outbox.append(publish.error_response(seq.request_id, seq.request.client_id, error))
        self._settle(seq, undo=True)

    def _leave(self, seq: Sequence) -> None:
        """Queue, slot and blocks no longer know the sequence as live. A session's KV stays cached, a request's does not."""
        self.scheduler.remove(seq)
        del self._live[seq.request_id]
        seq.num_inflight_tokens = seq.num_inflight_samples = 0
        if self._in_flight is not None:
            self._in_flight.dropped.add(seq.seq_id)
        seq.apply(Event.REST if self._stays(seq) else Event.RETIRE)
        self.kv.release(seq, keep=seq.status is Status.IDLE)

    def _stays(self, seq: Sequence) -> bool:
        return seq.session_id is not None and not (seq.request.session.end or seq.erase_when_finished)

    def _settle(self, seq: Sequence, keep_output_tokens: int | None = None, undo: bool = False) -> None:
        """A session between turns: cut its log where asked, note its use. One that ended leaves the table.

        A turn that failed, or ended before its first admission, is undone: the client may send it again.
        """
        if seq.session_id is None:
            return
        if seq.status is Status.RETIRED:
            self.sessions.erase(seq.session_id)
            return
        if undo or not seq.first_scheduled_ns:
            self.kv.truncate(seq, seq.num_history_tokens)
            seq.undo_turn()
        elif keep_output_tokens is not None and keep_output_tokens < seq.num_output_tokens:
            keep = seq.num_prompt_tokens + keep_output_tokens
            self.kv.truncate(seq, keep)
            seq.truncate(keep)
        seq.end_turn()
        self.sessions.touch(seq.session_id, self.clock.monotonic_ns())

    def _fail_rejected(self, plan: StepPlan) -> None:
        for seq in plan.rejected:
            self._fail(seq, never_fits(self.kv, seq.num_prompt_tokens, seq.max_output_tokens))

    def _lose_steps(self, flights: list[Flight], error: Exception) -> None:
        """A step failed, and the pool with it: its requests end with an error, all others are evicted to their token ids."""
        log.error("step %d failed", flights[0].step.step_id, exc_info=error)
        self._in_flight = None
        for seq in {seq.seq_id: seq for flight in flights for seq in flight.sequences}.values():
            self._fail(seq, WorkerFailure(f"the model step failed ({type(error).__name__}); send the request again"))
        for seq in list(self.scheduler.running):  # had no tokens in these steps
            self._fail(seq, WorkerFailure("the KV pool was lost with a failed model step; send the request again"))
        self.kv.lose_everything()
        for flight in flights:
            self._record(flight)

    def _count_end(self, name: str) -> None:
        self._num_completed += 1
        totals = self.counters.requests_finished_total
        totals[name] = totals.get(name, 0) + 1

    def _record(self, flight: Flight) -> None:
        """Close the books of a step. Its time begins where that of the step before it ended, if it was launched earlier."""
        plan, counters = flight.plan, self.counters
        before_ns = self._latest.ended_ns if self._latest is not None else 0
        counters.steps_total += 1
        counters.pauses_total += len(plan.paused)
        counters.cached_tokens_total += plan.num_cached_tokens
        counters.sequences_evicted_total += plan.num_evicted
        self._latest = StepRecord(
            flight.step.step_id,
            max(flight.started_ns, before_ns),
            self.clock.monotonic_ns(),
            self._num_completed,
            len(plan.generation),
            len(plan.context),
            sum(num_tokens for _, num_tokens in plan.context),
        )
        self._num_completed = 0
        self.iteration = flight.step.step_id + 1

    def _gauges(self, latest: IterationStats) -> IterationStats:
        """`latest` with everything that can be read off the present state."""
        waiting = self.scheduler.waiting
        return msgspec.structs.replace(
            latest,
            num_active_requests=len(self._live),
            num_queued_requests=len(waiting) - waiting.num_paused,
            num_paused_requests=waiting.num_paused,
            max_num_active_requests=self.kv.slots.num_slots,
            num_sessions=len(self.sessions),
            kv_cache=self.kv.stats(),
        )
