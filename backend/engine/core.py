"""EngineCore: owns every Sequence, and runs the persistent batch one step at a time.

    expire -> schedule -> submit -> collect -> update -> publish

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
from collections import deque

from backend.api.config import EngineConfig
from backend.api.errors import EverbatchError, InvalidRequest, SessionError, SessionStatus
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import FinishReason, Response
from backend.api.stats import EngineCounters, EngineStats, IterationStats, Records
from backend.core.clock import Clock, SystemClock
from backend.core.sequence import Event, Sequence, SessionKey, Status
from backend.core.step import StepOutput, WorkerGroup, WorkersLost
from backend.engine import gathered, publish, update
from backend.engine.flight import Flight, WorkerFailure, check_samples
from backend.engine.intake import Intake, never_fits
from backend.engine.outbox import Outbox
from backend.engine.recorder import Recorder
from backend.engine.sessions import SessionTable
from backend.engine.statistics import Gauges, Statistics
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.sizing import num_pool_blocks
from backend.scheduler.scheduler import Scheduler

log = logging.getLogger("everbatch.engine")


class EngineCore:
    def __init__(self, config: EngineConfig, workers: WorkerGroup, clock: Clock | None = None) -> None:
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
            config.records.max_kv_events,
        )
        workers.initialize_kv_cache(num_blocks, config.kv_cache.block_size, self.kv.num_backed_blocks)
        self.scheduler = Scheduler(config.scheduler, self.kv, on_cpu=self.model.device == "cpu")
        self.sessions = SessionTable(config.sessions, erase=lambda seq: self.kv.release(seq, keep=False))
        self.intake = Intake(config.limits, self.model, self.kv, self.scheduler, self.sessions)
        self.statistics = Statistics(self.clock)
        self._recorder = Recorder(config.records)
        self._num_launched = 0
        self._looks_ahead = self.model.looks_ahead
        self._in_flight: deque[Flight] = deque()  # oldest first; looking ahead at most two, else one
        self._live: dict[RequestId, Sequence] = {}
        self._deadlines: list[tuple[int, RequestId]] = []  # heap; holds entries of finished requests, which are skipped
        self._outbox = Outbox()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def counters(self) -> EngineCounters:
        """Totals since the engine was made."""
        return self.statistics.counters

    @property
    def iteration(self) -> int:
        """Steps that have landed."""
        return self.statistics.iteration

    @property
    def max_kv_tokens(self) -> int:
        """What the whole pool holds, in tokens: no sequence can be longer than about this."""
        return self.kv.usable_blocks * self.kv.block_size

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
            if request_id in self._live or request_id in self._outbox:
                raise InvalidRequest(
                    f"request id {request_id} is in use by a request that is still processed; choose another"
                )
            seq = self.intake.accept(request_id, request, now_ns)
        except EverbatchError as error:
            self.counters.requests_rejected_total += 1
            self._outbox.put(publish.error_response(request_id, request.client_id, error))
            return
        self._live[request_id] = seq
        self._note_deadline(seq)
        self.counters.requests_accepted_total += 1
        self.counters.prompt_tokens_total += seq.num_prompt_tokens - seq.num_history_tokens

    def cancel(self, request_id: RequestId, keep_output_tokens: int | None = None) -> None:
        """End a request wherever it is; its blocks and slot are free at once. Unknown ids are ignored.

        `keep_output_tokens`: its text has ended at a stop string, whose last token is that many output tokens into this turn.
        That is no cancellation but an end by stop words, and the log of a session is cut there.
        """
        seq = self._live.get(request_id)
        if seq is not None:
            reason = FinishReason.CANCELLED if keep_output_tokens is None else FinishReason.STOP_WORDS
            if keep_output_tokens is not None:
                self.counters.discarded_tokens_total += max(0, seq.num_output_tokens - keep_output_tokens)
            self._finish(seq, reason, keep_output_tokens)

    def stop_session(self, request_id: RequestId, session_id: SessionId, end: bool, namespace: str = "") -> None:
        """Interrupt the running turn of a session; `end` erases the session as well. Answered under `request_id`.

        `namespace`: the client's; sessions of others are not known to it.
        """
        key = SessionKey(namespace, session_id)
        seq = self.sessions.get(key)
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
            self._outbox.put(publish.error_response(request_id, None, error))
            return
        if seq.status is Status.IDLE:
            self.sessions.erase(key)
        else:
            seq.erase_when_finished = end
            self._finish(seq, FinishReason.CANCELLED)
        self._outbox.put(publish.empty_response(request_id))

    def step(self) -> list[Response]:
        """Run one iteration of the persistent batch and return the responses that became ready, in order."""
        started_ns = self.clock.monotonic_ns()
        self._expire(started_ns)
        flight = self._schedule(started_ns)
        try:
            if flight is not None:
                self._submit(flight)
            landed = self._collect(flight)
        except WorkersLost:
            raise
        except Exception as error:  # the workers' own failures are of any class; the engine must outlive them
            self._lose_steps(error)
        else:
            if landed is not None:
                self._publish(self._update(*landed))
                self._record(landed[0])
        return self.take_responses()

    def take_responses(self) -> list[Response]:
        """Hand over what is ready, without a step; answers to commands are."""
        if not self.scheduler.running:
            self._outbox.let_go()
        return self._outbox.take()

    def take_records(self) -> Records | None:
        """Hand over what the steps since the last call did, as far as the configuration asks for it; None = nothing."""
        return self._recorder.take(self.kv.take_events())

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
        self.kv.tick(now_ns)

    def _note_deadline(self, seq: Sequence) -> None:
        """Enter the deadline of a request. Entries of finished ones are thrown out once they are the greater part."""
        if len(self._deadlines) > 2 * len(self._live) + 64:
            live = [(other.deadline_ns, request_id) for request_id, other in self._live.items()]
            self._deadlines = [(ns, request_id) for ns, request_id in live if ns is not None]
            heapq.heapify(self._deadlines)
        elif seq.deadline_ns is not None:
            heapq.heappush(self._deadlines, (seq.deadline_ns, seq.request_id))

    def stats(self) -> EngineStats:
        """A snapshot. What the last step did is told only while there is work."""
        return self.statistics.snapshot(self._gauges(), self.has_work, self.workers.memory_use)

    def latest_iteration(self) -> IterationStats:
        """What the latest step did, with gauges of the present state."""
        return self.statistics.latest_iteration(self._gauges())

    def check_integrity(self) -> None:
        """Raise AssertionError when cache, queues and live requests contradict each other."""
        self.kv.check_integrity(self.scheduler.running)
        queued = {seq.request_id for seq in (*self.scheduler.waiting, *self.scheduler.running)}
        assert queued == set(self._live), f"queued or running {sorted(queued)} != live requests {sorted(self._live)}"
        for seq in self.scheduler.running:
            assert seq.status is Status.RUNNING and seq.slot is not None, f"{seq!r} is in the batch"
        for seq in self.scheduler.waiting:
            assert seq.status in (Status.WAITING, Status.PAUSED) and seq.slot is None, f"{seq!r} is in the queue"

    def _schedule(self, started_ns: int) -> Flight | None:
        """Plan a step and commit it. None when there is nothing to run, or nothing before the step in flight has landed."""
        plan = self.scheduler.schedule()
        if plan.is_empty or (self._in_flight and plan.must_wait):
            return None
        step = self.scheduler.commit(plan, self._num_launched, started_ns)
        flight = Flight(plan, step, started_ns)
        for seq in plan.rejected:
            self._fail(seq, never_fits(self.kv, seq.num_prompt_tokens, seq.max_output_tokens))
        has_work = bool(step.rows or step.new_rows)
        if has_work or not self._in_flight:
            self._num_launched += 1
        if has_work:
            return flight
        if not self._in_flight:
            self._record(flight)
        return None

    def _submit(self, flight: Flight) -> None:
        """Hand a step to the workers. Raises whatever they do; then all that is in flight is lost."""
        self._in_flight.append(flight)
        self.workers.submit(flight.step)

    def _collect(self, submitted: Flight | None) -> tuple[Flight, StepOutput] | None:
        """Wait for the oldest step in flight; None when nothing is, or only the one that this iteration has submitted and that
        looking ahead leaves running. Raises like `_submit`.
        """
        if len(self._in_flight) <= (self._looks_ahead and submitted is not None):
            return None
        output = self.workers.collect()
        check_samples(self._in_flight[0].step, output)
        return self._in_flight.popleft(), output

    def _update(self, flight: Flight, output: StepOutput) -> list[tuple[Sequence, FinishReason]]:
        """Book what a step did: counters, tokens, KV. Returns the sequences with news, in row order, and whether they end."""
        plan, dropped, now_ns = flight.plan, flight.dropped, self.clock.monotonic_ns()
        if output.gathered or output.failed:
            for seq, error in gathered.book(flight, output):
                self._fail(seq, error)
        self.statistics.iteration = flight.step.step_id
        counters = self.counters
        news: list[tuple[Sequence, FinishReason]] = []
        samples = iter(output.sampled)
        for seq, sample in zip(plan.generation, samples):
            if dropped and seq.seq_id in dropped:
                continue
            update.advance_by_newest(seq)
            if seq.num_computed_tokens >= seq.kv_due_at:
                self.kv.advance(seq)
            update.append_token(seq, sample, now_ns)
            news.append((seq, update.finish_reason(seq)))
        counters.generated_tokens_total += len(news)
        rows = flight.step.rows[len(plan.generation) :]
        for (seq, num_tokens), row in zip(plan.context, rows, strict=True):
            first = next(samples) if row.samples else None  # token of its output
            if seq.seq_id in dropped:
                continue
            context, recomputed = update.advance(seq, num_tokens)
            counters.context_tokens_total += context
            counters.recomputed_tokens_total += recomputed
            self.kv.advance(seq)
            if first is not None:
                update.append_token(seq, first, now_ns)
                counters.generated_tokens_total += 1
            asked_for_no_output = first is None and not seq.num_uncomputed_tokens + seq.num_inflight_tokens
            if first is not None or asked_for_no_output:
                news.append((seq, update.finish_reason(seq)))
        return news

    def _publish(self, news: list[tuple[Sequence, FinishReason]]) -> None:
        """Tell what is new of each sequence, and take out those that end."""
        iteration = self.iteration
        for seq, reason in news:
            if reason is not FinishReason.NOT_FINISHED:
                self._finish(seq, reason, with_batch=self.scheduler.is_static and seq.session_key is None)
            elif seq.request.streaming:
                self._outbox.put(publish.result_response(seq, iteration))

    def _finish(
        self, seq: Sequence, reason: FinishReason, keep_output_tokens: int | None = None, with_batch: bool = False
    ) -> None:
        """Take a sequence out, release what it holds, then answer: in this order, so that a final response means all is free.
        `with_batch`: the answer waits until nobody runs; that of a turn never does, for its session may go on.
        """
        seq.finish_reason = reason
        self._leave(seq)
        self.statistics.count_end(reason.name)
        (self._outbox.hold if with_batch else self._outbox.put)(publish.result_response(seq, self.iteration))
        self._settle(seq, keep_output_tokens)

    def _fail(self, seq: Sequence, error: EverbatchError) -> None:
        if seq.session_key is not None:
            error = SessionError(SessionStatus.FAIL, error.message, error.code)
        self._leave(seq)
        self.statistics.count_end("ERROR")
        self.counters.discarded_tokens_total += seq.num_tokens - seq.num_published_tokens
        account = publish.perf_metrics(seq)
        self._outbox.put(publish.error_response(seq.request_id, seq.request.client_id, error, account))
        self._settle(seq, undo=True)

    def _leave(self, seq: Sequence) -> None:
        """Queue, slot and blocks no longer know the sequence as live. A session's KV stays cached, a request's does not."""
        self._recorder.note_end(seq)
        self.scheduler.remove(seq)
        del self._live[seq.request_id]
        seq.num_inflight_tokens = seq.num_inflight_samples = 0
        for flight in self._in_flight:
            flight.dropped.add(seq.seq_id)
        seq.apply(Event.REST if self._stays(seq) else Event.RETIRE)
        self.kv.release(seq, keep=seq.status is Status.IDLE)

    def _stays(self, seq: Sequence) -> bool:
        session = seq.request.session
        return session is not None and not (session.end or seq.erase_when_finished)

    def _settle(self, seq: Sequence, keep_output_tokens: int | None = None, undo: bool = False) -> None:
        """A session between turns: cut its log where asked, note its use. One that ended leaves the table.

        A turn that failed, or ended before its first admission, is undone: the client may send it again.
        """
        if seq.session_key is None:
            return
        if seq.status is Status.RETIRED:
            self.sessions.erase(seq.session_key)
            return
        if undo or not seq.first_scheduled_ns:
            self.kv.truncate(seq, seq.num_history_tokens)
            seq.undo_turn()
        elif keep_output_tokens is not None and keep_output_tokens < seq.num_output_tokens:
            keep = seq.num_prompt_tokens + keep_output_tokens
            self.kv.truncate(seq, keep)
            seq.truncate(keep)
        seq.end_turn()
        self.sessions.touch(seq.session_key, self.clock.monotonic_ns())

    def _lose_steps(self, error: Exception) -> None:
        """A step failed, and the pool with it: its requests end with an error, all others are evicted to their token ids."""
        flights = list(self._in_flight)
        log.error("step %d failed", flights[0].step.step_id, exc_info=error)
        self._in_flight.clear()
        for seq in {seq.seq_id: seq for flight in flights for seq in flight.sequences}.values():
            self._fail(seq, WorkerFailure(f"the model step failed ({type(error).__name__}); send the request again"))
        for seq in list(self.scheduler.running):  # had no tokens in these steps
            self._fail(seq, WorkerFailure("the KV pool was lost with a failed model step; send the request again"))
        self.kv.lose_everything()
        for flight in flights:
            self._record(flight)

    def _record(self, flight: Flight) -> None:
        self.statistics.record(flight)
        if self._recorder.wants_steps:
            self._recorder.record(flight, self.latest_iteration(), self._live.values())

    def _gauges(self) -> Gauges:
        waiting = self.scheduler.waiting
        return Gauges(
            num_active_requests=len(self._live),
            num_queued_requests=len(waiting) - waiting.num_paused,
            num_paused_requests=waiting.num_paused,
            max_num_active_requests=self.kv.num_slots,
            num_sessions=len(self.sessions),
            kv_cache=self.kv.stats(),
        )
