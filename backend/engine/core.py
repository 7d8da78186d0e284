"""EngineCore: owns every Sequence, and runs the persistent batch one step at a time.

    admit -> expire -> schedule -> submit -> collect -> update -> publish

    one step at a time      schedule 1, submit 1, collect 1, update 1      schedule 2, submit 2, collect 2, update 2
    looking ahead           schedule 1, submit 1      schedule 2, submit 2, collect 1, update 1      schedule 3, submit 3, ...

Looking ahead, the host's work is done while the device is busy. A sequence that ends is then found out one step late: its row
in the step in flight is dropped when that lands. A plan that needs to know what is in flight (StepPlan.must_wait) is dropped.

Commands (enqueue, cancel, stop_session) are applied between steps. Each accepted request gets exactly one final response; a
failed command gets an error response. Not thread-safe: one thread drives it.
"""

from __future__ import annotations

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
from backend.engine import beam_step, gathered, groups, publish, row_step, update
from backend.engine.antechamber import Antechamber
from backend.engine.beams import BeamSearch, search_of
from backend.engine.deadlines import Deadlines
from backend.engine.flight import Flight, WorkerFailure, check_samples
from backend.engine.intake import Intake, never_fits
from backend.engine.outbox import Outbox
from backend.engine.prefetch import make_adapters
from backend.engine.recorder import Recorder
from backend.engine.sessions import SessionTable, stays
from backend.engine.statistics import Gauges, Statistics, gauges
from backend.kvcache.manager import KVCacheManager
from backend.kvcache.sizing import num_pool_blocks
from backend.scheduler.model_drafting import make_drafter
from backend.scheduler.scheduler import Scheduler

log = logging.getLogger("everbatch.engine")


class EngineCore:
    def __init__(self, config: EngineConfig, workers: WorkerGroup, clock: Clock | None = None) -> None:
        """Load the model, size the KV pool, prepare the persistent batch. Raises ConfigError."""
        self.config = config
        self.clock = clock or SystemClock()
        self.workers = workers
        self.model = workers.load()
        free_bytes = workers.free_memory_bytes()
        num_blocks = num_pool_blocks(config, self.model, free_bytes)
        self.kv = KVCacheManager(
            config.kv_cache,
            num_blocks,
            config.scheduler.max_batch_size,
            self.model.sliding_window,
            config.scheduler.max_num_tokens,
            config.records.max_kv_events,
        )
        workers.initialize_kv_cache(num_blocks, config.kv_cache.block_size, self.kv.num_backed_blocks)
        self.adapters = make_adapters(config, self.model, workers, free_bytes)
        drafter = make_drafter(config, self.model.takes_drafts, self.clock)
        on_cpu, units = self.model.device == "cpu", self.model.has_matrix_units
        self.scheduler = Scheduler(config.scheduler, self.kv, on_cpu, units, self.adapters, drafter)
        self.sessions = SessionTable(config.sessions, erase=lambda seq: self.kv.release(seq, keep=False))
        self.intake = Intake(config.limits, self.model, self.kv, self.scheduler, self.sessions, config.guided.max_bytes)
        self.antechamber = Antechamber(workers, self.adapters, config.lora.put_workers, config.limits.max_queue_size)
        self.statistics = Statistics(self.clock)
        self._recorder = Recorder(config.records)
        self._num_launched = 0
        self._looks_ahead = self.model.looks_ahead
        self._in_flight: deque[Flight] = deque()  # oldest first; looking ahead at most two, else one
        self._live: dict[RequestId, Sequence] = {}  # of a request's sequences the first that lives
        self._deadlines = Deadlines()
        self._outbox = Outbox()
        self._interval = publish.Interval(int(config.triton.stream_interval_ms * 1e6))

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
        """Requests that have come and not finished."""
        return len(self._live) + len(self.antechamber)

    def live_ids(self) -> list[RequestId]:
        """Their ids, in order of acceptance; those in the antechamber come last."""
        return [*self._live, *self.antechamber]

    def begin_poll(self) -> None:
        """The commands that follow, up to the next call, have arrived at the same moment."""
        self.intake.sessions_this_poll.clear()

    def enqueue(self, request_id: RequestId, request: Request) -> None:
        """Accept a request, or answer it with an error."""
        now_ns = self.clock.monotonic_ns()
        try:
            if request_id in self._live or request_id in self.antechamber or self._outbox.holds(request_id):
                raise InvalidRequest(f"request id {request_id} is in use by a request still processed; choose another")
            request = self.intake.ready_to_wait(request)
            if self.antechamber.enter(request_id, request, now_ns, self.intake.deadline_ns(request, now_ns)):
                return
        except EverbatchError as error:
            self.refuse(request_id, request.client_id, error)
        else:
            self._accept(request_id, request, now_ns)

    def admit(self) -> None:
        """Accept those of the antechamber who have what they waited for, or refuse them. Every step begins with it."""
        for waiting in self.antechamber.take_ready():
            if waiting.error is None:
                self._accept(waiting.request_id, waiting.request, waiting.arrived_ns)
            else:
                self.refuse(waiting.request_id, waiting.request.client_id, waiting.error)

    def _accept(self, request_id: RequestId, request: Request, now_ns: int) -> None:
        try:
            seq = self.intake.accept(request_id, request, now_ns)
        except EverbatchError as error:
            self.antechamber.end(request_id, request)
            self.refuse(request_id, request.client_id, error)
            return
        self._live[request_id] = seq
        self._deadlines.note(seq, self._live)
        self.counters.requests_accepted_total += 1
        self.counters.prompt_tokens_total += seq.num_prompt_tokens - seq.num_history_tokens

    def refuse(self, request_id: RequestId, client_id: int | None, error: EverbatchError) -> None:
        """Answer a request that is not accepted."""
        self.counters.requests_rejected_total += 1
        self._outbox.put(publish.error_response(request_id, client_id, error))

    def cancel(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None:
        """End a request wherever it is, or one of its sequences; blocks and slots are free at once. Unknown ids are ignored.

        `keep_output_tokens`: its text has ended at a stop string, whose last token is that many output tokens into this turn.
        That is no cancellation but an end by stop words, and the log of a session is cut there.
        """
        if sequence_index is None:  # none of its sequences is there yet
            self._end_waiting(request_id, FinishReason.CANCELLED)
        live = self._live.get(request_id)
        for seq in [] if live is None else groups.members(live, sequence_index):
            reason = FinishReason.CANCELLED if keep_output_tokens is None else FinishReason.STOP_WORDS
            if keep_output_tokens is not None:
                self.counters.discarded_tokens_total += max(0, seq.num_output_tokens - keep_output_tokens)
            self._finish(seq, reason, keep_output_tokens)

    def stop_session(self, request_id: RequestId, session_id: SessionId, end: bool, namespace: str = "") -> None:
        """Interrupt the running turn of a session; `end` erases the session as well. Answered under `request_id`.

        `namespace`: the client's; sessions of others are not known to it.
        """
        key = SessionKey(namespace, session_id)
        turn = self.antechamber.turn_of(key)
        waited = turn is not None and self._end_waiting(turn, FinishReason.CANCELLED)
        try:
            seq = self.sessions.check_stop(key, end)
        except SessionError as error:
            answer = publish.empty_response(request_id) if waited else publish.error_response(request_id, None, error)
            self._outbox.put(answer)
            return
        if seq.status is Status.IDLE:
            self.sessions.erase(key)
        else:
            seq.erase_when_finished = end
            self._finish(seq, FinishReason.CANCELLED)
        self._outbox.put(publish.empty_response(request_id))

    def _end_waiting(self, request_id: RequestId, reason: FinishReason) -> bool:
        """End a request of the antechamber; whether there is one of this id."""
        waiting = self.antechamber.leave(request_id)
        if waiting is not None:
            self.statistics.count_unqueued(reason.name)
            self._outbox.put(publish.unqueued_response(request_id, waiting.request, reason))
        return waiting is not None

    def step(self) -> list[Response]:
        """Run one iteration of the persistent batch and return the responses that became ready, in order."""
        started_ns = self.clock.monotonic_ns()
        self.admit()
        self.expire()
        flight = self._schedule(started_ns)
        try:
            if flight is not None:
                self._in_flight.append(flight)
                self.workers.submit(flight.step)
            landed = self._collect(flight)
        except WorkersLost:
            raise
        except Exception as error:  # the workers' own failures are of any class; the engine must outlive them
            self._lose_steps(error)
        else:
            if landed is not None:
                self._update(*landed)
                self._record(*landed)
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
        for waiting in self.antechamber.close():
            self.refuse(waiting.request_id, waiting.request.client_id, error)
        for seq in list(self._live.values()):
            self._fail(seq, error)

    def expire(self) -> None:
        """End requests that are past their deadline, and sessions that nobody has used for long; in every step."""
        now_ns = self.clock.monotonic_ns()
        for request_id in self.antechamber.late(now_ns):
            self._end_waiting(request_id, FinishReason.TIMED_OUT)
        for live in self._deadlines.pop_due(now_ns, self._live):
            for seq in groups.members(live):
                self._finish(seq, FinishReason.TIMED_OUT)
        self.sessions.expire(now_ns)
        self.kv.tick(now_ns)

    def stats(self) -> EngineStats:
        """A snapshot. What the last step did is told only while there is work."""
        return self.statistics.snapshot(self._gauges(), self.has_work, self.workers.memory_use)

    def latest_iteration(self) -> IterationStats:
        """What the latest step did, with gauges of the present state."""
        return self.statistics.latest_iteration(self._gauges())

    def check_integrity(self) -> None:
        """Raise AssertionError when cache, queues and live requests contradict each other."""
        self.kv.check_integrity(self.scheduler.running)
        groups.check_integrity(self.scheduler, self._live)

    def _schedule(self, started_ns: int) -> Flight | None:
        """Plan a step and commit it. None when there is nothing to run, or nothing before the step in flight has landed."""
        plan = self.scheduler.schedule()
        if plan.is_empty or (self._in_flight and plan.must_wait):
            return None
        step = self.scheduler.commit(plan, self._num_launched, started_ns)
        flight = Flight(plan, step, started_ns)
        for seq in filter(publish.holds_back, plan.paused):  # nobody knows when it goes on
            self._outbox.put(publish.result_response(seq, self.iteration))
        for seq in plan.rejected:
            size = seq.num_prompt_tokens, seq.max_output_tokens, seq.beam_width
            self._fail(seq, never_fits(self.kv, self.scheduler.blocks_needed(*size), *size))
        has_work = bool(step.rows or step.new_rows)
        if has_work or not self._in_flight:
            self._num_launched += 1
        if has_work:
            return flight
        if not self._in_flight:
            self._record(flight)
        return None

    def _collect(self, submitted: Flight | None) -> tuple[Flight, StepOutput] | None:
        """Wait for the oldest step in flight; None when nothing is, or only the one that this iteration has submitted and that
        looking ahead leaves running. Raises whatever the workers do; then all that is in flight is lost.
        """
        if len(self._in_flight) <= (self._looks_ahead and submitted is not None):
            return None
        output = self.workers.collect()
        check_samples(self._in_flight[0].step, output)
        return self._in_flight.popleft(), output

    def _update(self, flight: Flight, output: StepOutput) -> None:
        """Book what a step did, and tell whom it concerns."""
        now_ns, self.statistics.iteration = self.clock.monotonic_ns(), flight.step.step_id
        if output.gathered or output.failed:
            for seq, error in gathered.book(flight, output):
                self._fail(seq, error)
        if flight.plan.beam_width > 1:
            self._advance_beams(beam_step.book(flight, output, self.kv, self.counters), now_ns)
        else:
            self._publish(row_step.book(flight, output, self.kv, self.counters, now_ns), now_ns)

    def _advance_beams(self, searches: list[BeamSearch], now_ns: int) -> None:
        """Take searches one token further, and tell what is new of each."""
        for search in searches:
            reason = beam_step.take_further(search, self.kv, self.scheduler, now_ns)
            first = search.members[0]
            if isinstance(reason, EverbatchError):
                self._fail(first, reason)
            elif reason is FinishReason.NOT_FINISHED and first.request.streaming:
                self._outbox.put(publish.beams_response(first, search.told(reason), self.iteration, is_final=False))
            elif reason not in (None, FinishReason.NOT_FINISHED):
                self._finish(first, reason)

    def _publish(self, news: list[tuple[Sequence, FinishReason]], now_ns: int) -> None:
        """Tell what is new of each sequence, and take out those that end."""
        iteration, tells_all = self.iteration, self._interval.is_over(now_ns)
        for seq, reason in news:
            if reason is not FinishReason.NOT_FINISHED:
                self._finish(seq, reason)
            elif seq.request.streaming and (tells_all or publish.is_told_at_once(seq)):
                self._outbox.put(publish.result_response(seq, iteration))

    def _finish(self, seq: Sequence, reason: FinishReason, keep_output_tokens: int | None = None) -> None:
        """Take a sequence out, release what it holds, then answer: in this order, so that a final response means all is free."""
        if seq.beam_width > 1:
            self._finish_beams(search_of(seq), reason, keep_output_tokens)
            return
        seq.finish_reason = reason
        self._leave(seq)
        if seq.group is None or not seq.group.members:
            self.statistics.count_end(reason.name)
        held = self.scheduler.is_static and update.ends_with_its_batch(seq, reason, keep_output_tokens)
        self._outbox.put(publish.result_response(seq, self.iteration), held=held)
        self.sessions.settle(seq, self.kv, self.clock.monotonic_ns(), keep_output_tokens)

    def _finish_beams(self, search: BeamSearch, reason: FinishReason, keep_output_tokens: int | None) -> None:
        """`_finish` of all rows of a search. Does nothing when it has ended before."""
        if not search.members:
            return
        rows, hypotheses = list(search.members), search.told(reason)
        for row in rows:
            row.finish_reason = reason
            self._leave(row)
        self.statistics.count_end(reason.name)
        held = self.scheduler.is_static and update.ends_with_its_batch(rows[0], reason, keep_output_tokens)
        self._outbox.put(publish.beams_response(rows[0], hypotheses, self.iteration, is_final=True), held=held)

    def _fail(self, seq: Sequence, error: EverbatchError) -> None:
        """End the request of a sequence, with all its sequences."""
        if seq.status is Status.RETIRED:
            return  # with another one of its request
        if seq.session_key is not None:
            error = SessionError(SessionStatus.FAIL, error.message, error.code)
        for member in groups.members(seq):
            self._leave(member)
            self.counters.discarded_tokens_total += member.num_tokens - member.num_published_tokens
        self.statistics.count_end("ERROR")
        account = publish.perf_metrics(seq)
        self._outbox.put(publish.error_response(seq.request_id, seq.request.client_id, error, account))
        self.sessions.settle(seq, self.kv, self.clock.monotonic_ns(), undo=True)

    def _leave(self, seq: Sequence) -> None:
        """Queue, slot and blocks no longer know the sequence as live. A session's KV stays cached, a request's does not."""
        self.scheduler.remove(seq)
        another = groups.leave(seq)
        if another is None:
            self._recorder.note_end(seq)
            del self._live[seq.request_id]
            self.antechamber.end(seq.request_id, seq.request)
        else:
            self._live[seq.request_id] = another
        seq.num_inflight_tokens = seq.num_inflight_samples = seq.num_inflight_drafts = 0
        for flight in self._in_flight:
            flight.dropped.add(seq.seq_id)
        seq.apply(Event.REST if stays(seq) else Event.RETIRE)
        self.kv.release(seq, seq.status is Status.IDLE, groups.has_heirs(seq))

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
        self.adapters.send_again()
        for flight in flights:
            self._record(flight)

    def _record(self, flight: Flight, output: StepOutput | None = None) -> None:
        self.scheduler.note_step(flight.plan, self.statistics.record(flight))
        if self._recorder.wants_steps:
            tensors = {} if output is None else output.debug_tensors
            self._recorder.record(flight, self.latest_iteration(), self._live.values(), tensors)

    def _gauges(self) -> Gauges:
        return gauges(self.num_live, self.scheduler.waiting, len(self.sessions), self.kv)
