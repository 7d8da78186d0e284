"""EngineCore: owns every Sequence, and runs the persistent batch one step at a time.

    admit -> expire -> schedule -> submit -> collect -> update -> publish      (looking ahead: engine/steps_in_flight.py)

Commands (enqueue, cancel, stop_session) are applied between steps. Each accepted request gets exactly one final response; a
failed command gets an error response. An exception that concerns one request ends that request, not the engine. Not
thread-safe: one thread drives it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from backend.api.config.schema import EngineConfig
from backend.api.errors import EngineFault, EverbatchError, InvalidRequest, SessionError, SessionStatus
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import FinishReason, Response
from backend.api.stats import EngineCounters, EngineStats, IterationStats, Records
from backend.core.clock import Clock, SystemClock
from backend.core.messages import Resume
from backend.core.sequence import Event, Sequence, SessionKey, Status
from backend.core.step import StepOutput, WorkerGroup, WorkersLost
from backend.engine import beam_step, gathered, groups, publish, row_step, update
from backend.engine.beams import BeamSearch, search_of
from backend.engine.cache import make_cache, with_whole_texts
from backend.engine.deadlines import Deadlines
from backend.engine.intake import Intake
from backend.engine.make_level import MakeLevelIo
from backend.engine.names import AdapterNames
from backend.engine.prefetch import make_adapters
from backend.engine.preparation import Preparation, Waiting
from backend.engine.publish import ResponseBuffer, empty_response
from backend.engine.recorder import KvEventSink, Recorder
from backend.engine.sessions import SessionTable, stays
from backend.engine.statistics import Gauges, Statistics, gauges
from backend.engine.steps_in_flight import StepInFlight, StepsInFlight, WorkerFailure
from backend.engine.transfer import Transfer
from backend.kvcache.sizing import with_usable_blocks
from backend.scheduler.model_drafting import make_drafter
from backend.scheduler.scheduler import Scheduler

log = logging.getLogger("everbatch.engine")


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        workers: WorkerGroup,
        clock: Clock | None = None,
        kv_events: KvEventSink | None = None,
        level_io: MakeLevelIo | None = None,
        pool_descriptor: int | None = None,
    ) -> None:
        """Load the model, size the KV pool, prepare the batch (see make_cache). Raises ConfigError. `kv_events`: gets all."""
        self.clock, self.workers, self.model = clock or SystemClock(), workers, workers.load()
        self.config = config = with_whole_texts(with_usable_blocks(config, self.model), self.model)
        cache = self.cache = make_cache(config, self.model, workers, kv_events, level_io, self.clock, pool_descriptor)
        self.kv, self.level = cache.kv, cache.level
        self.max_kv_tokens = self.kv.usable_blocks * self.kv.block_size  # about the longest sequence that can run
        self.adapters = make_adapters(config, self.model, workers, cache.free_bytes)
        drafter = make_drafter(config, self.model.takes_drafts, self.clock)
        on_cpu, units = self.model.device == "cpu", self.model.has_matrix_units
        parts = self.adapters, drafter, self.level.loads, self.model.whole_images
        self.scheduler = Scheduler(config.scheduler, self.kv, on_cpu, units, *parts)
        self.sessions = SessionTable(config.sessions, self.kv.block_size, lambda seq: self.kv.release(seq, keep=False))
        self.statistics = Statistics(self.clock)
        self.counters: EngineCounters = self.statistics.counters  # totals since the engine started
        self._transfer = Transfer(config.kv_transfer, self.model, self.kv, workers, self.counters)
        self.intake = Intake(config, self.model, self.kv, self.scheduler, self.sessions, self._transfer)
        self.preparation = Preparation(workers, self.adapters, config.lora.put_workers, config.limits.max_queue_size)
        self._recorder = Recorder(config.records, self.kv, kv_events)
        self._in_flight = StepsInFlight(workers, self.model.looks_ahead)
        self._live: dict[RequestId, Sequence] = {}  # request -> its first live sequence
        self._deadlines, self.outbox = Deadlines(), ResponseBuffer()
        self.names = AdapterNames(config.lora, workers.prepare_adapter, self.adapters.check_fits, self.outbox.put)
        self._interval = publish.Interval(int(config.triton.stream_interval_ms * 1e6))

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def iteration(self) -> int:
        """The number of steps that have landed."""
        return self.statistics.iteration

    @property
    def num_live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live) + len(self.preparation)

    def live_ids(self) -> list[RequestId]:
        """Ids of the live requests in the order of acceptance; those that wait in Preparation come last."""
        return [*self._live, *self.preparation]

    def begin_poll(self) -> None:
        """Commands between two calls count as having arrived at the same time (conflicts of session turns)."""
        self.intake.sessions_this_poll.clear()

    def enqueue(
        self, request_id: RequestId, request: Request, arrived_ns: int | None = None, resume: Resume | None = None
    ) -> None:
        """Accept a request, or answer it with an error. `arrived_ns`: its arrival by the engine's clock; None: now."""
        now_ns = self.clock.monotonic_ns() if arrived_ns is None else arrived_ns
        if request_id in self._live or request_id in self.preparation or self.outbox.holds(request_id):
            error = InvalidRequest(f"request id {request_id} is in use by a request still processed; choose another")
            self.refuse(request_id, request.client_id, error)
            return
        with self._contained(request_id, request):
            request = self.intake.check(request, resume)
            waiting = Waiting(request_id, request, now_ns, self.intake.deadline_ns(request, now_ns), resume)
            if not self.preparation.enter(waiting):
                self._accept(waiting)

    def admit(self) -> None:
        """Accept or refuse requests whose guide or adapter has become ready. Every step begins with this."""
        self.cache.advance(self.has_work)
        for waiting in self.preparation.take_ready(self.clock.monotonic_ns()):
            if waiting.error is None:
                with self._contained(waiting.request_id, waiting.request):
                    self._accept(waiting)
            else:
                self.refuse(waiting.request_id, waiting.request.client_id, waiting.error)

    def _accept(self, waiting: Waiting) -> None:
        seq = self.intake.accept(waiting.request_id, waiting.request, waiting.arrived_ns, waiting.resume)
        self.preparation.note(waiting, groups.members(seq))
        self._live[seq.request_id] = seq
        self._deadlines.note(seq, self._live)
        self.statistics.count_accepted(seq.num_prompt_tokens - seq.num_history_tokens)

    def refuse(self, request_id: RequestId, client_id: int | None, error: EverbatchError) -> None:
        """Answer a request that is not accepted with an error."""
        self.counters.requests_rejected_total += 1
        self.outbox.put(publish.error_response(request_id, client_id, error))

    def cancel(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None:
        """End a request wherever it is, or one of its sequences; blocks and slots are free at once. Unknown ids are ignored.
        `keep_output_tokens`: a stop string is complete after so many output tokens of this turn: a session's log is cut there."""
        with self._contained(request_id):
            if sequence_index is None:  # it may have no sequences yet
                self._end_waiting(request_id, FinishReason.CANCELLED)
            live = self._live.get(request_id)
            for seq in [] if live is None else groups.members(live, sequence_index):
                reason = FinishReason.CANCELLED if keep_output_tokens is None else FinishReason.STOP_WORDS
                if keep_output_tokens is not None:
                    self.counters.discarded_tokens_total += max(0, seq.num_output_tokens - keep_output_tokens)
                self._finish(seq, reason, keep_output_tokens)

    def stop_session(self, request_id: RequestId, session_id: SessionId, end: bool, namespace: str = "") -> None:
        """Interrupt the running turn of a session of this namespace; `end` erases it as well. Answered under `request_id`."""
        with self._contained(request_id):
            self._stop_session(request_id, SessionKey(namespace, session_id), end)

    def _stop_session(self, request_id: RequestId, key: SessionKey, end: bool) -> None:
        turn = self.preparation.waiting_turn(key)
        waited = turn is not None and self._end_waiting(turn, FinishReason.CANCELLED)
        try:
            seq = self.sessions.check_stop(key, end)
        except SessionError as error:
            self.outbox.put(empty_response(request_id) if waited else publish.error_response(request_id, None, error))
            return
        if seq.status is Status.IDLE:
            self.sessions.erase(key)
        else:
            seq.erase_when_finished = end
            self._finish(seq, FinishReason.CANCELLED)
        self.outbox.put(empty_response(request_id))

    def _end_waiting(self, request_id: RequestId, reason: FinishReason) -> bool:
        """End a request that waits in Preparation. Returns False if there is none with this id."""
        waiting = self.preparation.leave(request_id)
        if waiting is not None:
            self.statistics.count_unqueued(reason.name)
            self.outbox.put(publish.unqueued_response(request_id, waiting.request, reason))
        return waiting is not None

    def step(self) -> list[Response]:
        """Run one iteration of the persistent batch and return the responses that became ready, in order."""
        started_ns = self.clock.monotonic_ns()
        self.admit()
        self.expire()
        flight = self._schedule(started_ns)
        try:
            landed = self._in_flight.advance(flight)
        except WorkersLost:
            raise
        except Exception as error:  # workers may fail with any exception, and the engine must survive
            self._lose_steps(error)
        else:
            if landed is not None:
                self._update(*landed)
                self._record(*landed)
        return self.take_responses()

    def take_responses(self) -> list[Response]:
        """Take the responses that are ready without a step, such as answers to commands."""
        if not self.scheduler.running:
            self.outbox.let_go()
        return self.outbox.take()

    def take_records(self) -> Records | None:
        """Take the records of the steps since the last call that the configuration asks for; None if there are none."""
        return self._recorder.take()

    def fail_all(self, error: EverbatchError) -> None:
        """End every live request with `error`: at shutdown, and when the whole engine fails."""
        for waiting in self.preparation.close():
            self.refuse(waiting.request_id, waiting.request.client_id, error)
        for seq in list(self._live.values()):
            self._fail(seq, error)

    def expire(self) -> None:
        """End requests past their deadline, and sessions that have been idle for `idle_ttl_s`. Called in every step."""
        now_ns = self.clock.monotonic_ns()
        for request_id in self.preparation.late(now_ns):
            self._end_waiting(request_id, FinishReason.TIMED_OUT)
        for live in self._deadlines.pop_due(now_ns, self._live):
            with self._contained(live.request_id, live.request):
                for seq in groups.members(live):
                    self._finish(seq, FinishReason.TIMED_OUT)
        self.sessions.expire(now_ns)
        self.kv.tick(now_ns)

    def stats(self) -> EngineStats:
        """A snapshot of the statistics. Figures of the last step are included only while there is work."""
        return self.statistics.snapshot(self._gauges(), self.scheduler, self.has_work, self.workers.memory_use)

    def latest_iteration(self) -> IterationStats:
        """Statistics of the latest step, with gauges of the present state."""
        return self.statistics.latest_iteration(self._gauges())

    def close(self) -> None:
        """Release the workers, the sockets of KV events and the second level. Safe to call twice."""
        self.cache.close(flushes=not self._in_flight)
        self.workers.shutdown()
        self._recorder.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if cache, queues and live requests are inconsistent."""
        self.kv.check_integrity(self.scheduler.running)
        groups.check_integrity(self.scheduler, self._live)

    def _schedule(self, started_ns: int) -> StepInFlight | None:
        """Plan a step and commit it. None if there is nothing to run, or nothing until the step in flight has landed."""
        plan = self.scheduler.schedule()
        if plan.is_empty or (self._in_flight and plan.must_wait):
            return None
        flight = StepInFlight(plan, self.scheduler.commit(plan, self._in_flight.next_step_id, started_ns), started_ns)
        for seq in filter(publish.holds_back, plan.paused):  # published now, for they may stay paused for long
            self.outbox.put(publish.result_response(seq, self.iteration))
        for seq, error in self.intake.refusals(plan):
            self._fail(seq, error)
        if flight.has_work:
            return flight
        if not self._in_flight:
            self._in_flight.skip()
            self._record(flight)
        return None

    def _update(self, flight: StepInFlight, output: StepOutput) -> None:
        """Apply a landed step to its sequences, and publish the responses."""
        now_ns, self.statistics.iteration = self.clock.monotonic_ns(), flight.step.step_id
        if output.gathered or output.failed:
            for seq, error in gathered.apply(flight, output):
                self._fail(seq, error)
        if flight.plan.beam_width > 1:
            self._advance_beams(beam_step.apply(flight, output, self.kv, self.counters), now_ns)
        else:
            self._publish(row_step.apply(flight, output, self.kv, self.statistics, now_ns), now_ns)

    def _advance_beams(self, searches: list[BeamSearch], now_ns: int) -> None:
        """Advance beam searches by one token, and publish what has changed."""
        for search in searches:
            first = search.members[0]
            with self._contained(first.request_id, first.request):
                reason = beam_step.take_further(search, self.kv, self.scheduler, now_ns)
                first = search.members[0]
                if isinstance(reason, EverbatchError):
                    self._fail(first, reason)
                elif reason is FinishReason.NOT_FINISHED and first.request.streaming:
                    self.outbox.put(publish.beams_response(first, search.result(reason), self.iteration, False))
                elif reason not in (None, FinishReason.NOT_FINISHED):
                    self._finish(first, reason)

    def _publish(self, news: list[tuple[Sequence, FinishReason]], now_ns: int) -> None:
        """Publish the new tokens of each sequence, and finish those that have ended."""
        iteration, tells_all = self.iteration, self._interval.is_over(now_ns)
        for seq, reason in news:
            try:
                if reason is not FinishReason.NOT_FINISHED:
                    self._finish(seq, reason)
                elif seq.request.streaming and (tells_all or publish.is_published_at_once(seq)):
                    self.outbox.put(publish.result_response(seq, iteration))
            except Exception as error:  # not `_contained`, which would cost time for each row of each step
                self._give_up(seq.request_id, seq.request, error)

    def _finish(self, seq: Sequence, reason: FinishReason, keep_output_tokens: int | None = None) -> None:
        """Remove a sequence, release its resources, then answer: after a final response everything is free."""
        if seq.beam_width > 1:
            self._finish_beams(search_of(seq), reason, keep_output_tokens)
            return
        seq.finish_reason = reason
        state = self._transfer.state_of(seq) if seq.request.context_only and seq.num_output_tokens else None
        self._leave(seq)
        self.statistics.count_sequence(seq)
        if seq.group is None or not seq.group.members:
            self.statistics.count_end(reason.name, seq)
        held = self.scheduler.is_static and update.ends_with_its_batch(seq, reason, keep_output_tokens)
        self.outbox.put(publish.result_response(seq, self.iteration, state), held=held)
        self.sessions.settle(seq, self.kv, self.clock.monotonic_ns(), keep_output_tokens)

    def _finish_beams(self, search: BeamSearch, reason: FinishReason, keep_output_tokens: int | None) -> None:
        """`_finish` for all rows of a beam search. Does nothing if it has ended already."""
        if not search.members:
            return
        rows, hypotheses = list(search.members), search.result(reason)
        for row in rows:
            row.finish_reason = reason
            self._leave(row)
        self.statistics.count_end(reason.name)
        held = self.scheduler.is_static and update.ends_with_its_batch(rows[0], reason, keep_output_tokens)
        self.outbox.put(publish.beams_response(rows[0], hypotheses, self.iteration, is_final=True), held=held)

    def _fail(self, seq: Sequence, error: EverbatchError) -> None:
        """End the request of a sequence with an error, with all of its sequences."""
        if seq.status is Status.RETIRED:
            return  # it has ended together with another sequence of its request
        if seq.session_key is not None:
            error = SessionError(SessionStatus.FAIL, error.message, error.code)
        for member in groups.members(seq):
            self._leave(member)
            self.counters.discarded_tokens_total += member.num_tokens - member.num_published_tokens
        self.statistics.count_end("ERROR")
        self.outbox.put(publish.error_response(seq.request_id, seq.request.client_id, error, publish.perf_metrics(seq)))
        self.sessions.settle(seq, self.kv, self.clock.monotonic_ns(), undo=True)

    @contextmanager
    def _contained(self, request_id: RequestId, request: Request | None = None) -> Iterator[None]:
        """Any exception within ends this request only; it does not reach the loop or other requests."""
        try:
            yield
        except Exception as error:  # a refusal, or a defect of the engine with any exception class
            self._give_up(request_id, request, error)

    def _give_up(self, request_id: RequestId, request: Request | None, error: Exception) -> None:
        """End a request in any state with an error: a refusal, or a failure of the engine itself, which is logged."""
        if not isinstance(error, EverbatchError):
            log.error("the engine failed on request %d, which is ended", request_id, exc_info=error)
            error = EngineFault(f"the engine failed on this request ({type(error).__name__}); its log says why")
        if request_id in self._live:
            self._fail(self._live[request_id], error)
            return
        self.preparation.leave(request_id)
        if request is not None:
            self.preparation.end(request_id, request)
        self.refuse(request_id, None if request is None else request.client_id, error)

    def _leave(self, seq: Sequence) -> None:
        """Remove the sequence from queue, slot and blocks. The KV of a session stays in its block table."""
        self.scheduler.remove(seq)
        if (another := groups.leave(seq)) is None:
            self._recorder.note_end(seq)
            del self._live[seq.request_id]
            self.preparation.end(seq.request_id, seq.request)
        else:
            self._live[seq.request_id] = another
        seq.num_inflight_tokens = seq.num_inflight_samples = seq.num_inflight_drafts = 0
        self._in_flight.drop(seq.seq_id)
        seq.apply(Event.REST if stays(seq) else Event.RETIRE)
        self.kv.release(seq, seq.status is Status.IDLE, groups.has_waiting_siblings(seq))

    def _lose_steps(self, error: Exception) -> None:
        """A step has failed, and the pool is undefined: end its requests with an error, evict all others to their token ids."""
        flights = self._in_flight.lose()
        log.error("step %d failed", flights[0].step.step_id, exc_info=error)
        for seq in {seq.seq_id: seq for flight in flights for seq in flight.sequences}.values():
            self._fail(seq, WorkerFailure(f"the model step failed ({type(error).__name__}); send the request again"))
        for seq in list(self.scheduler.running):  # sequences that had no tokens in these steps
            self._fail(seq, WorkerFailure("the KV pool was lost with a failed model step; send the request again"))
        self.kv.lose_everything()
        self.adapters.send_again()
        for flight in flights:
            self._record(flight)

    def _record(self, flight: StepInFlight, output: StepOutput | None = None) -> None:
        self.scheduler.note_step(flight.plan, self.statistics.record(flight))
        if self._recorder.wants_steps:
            self._recorder.record(flight, self.latest_iteration(), self._live.values(), output)

    def _gauges(self) -> Gauges:
        preparing, sessions, images = len(self.preparation), len(self.sessions), self.preparation.image_stats()
        return gauges(self.num_live, preparing, self.scheduler, sessions, self.kv, self.level.stats(), images)
