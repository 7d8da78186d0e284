"""ModelServer: one Triton model in its stub process. It connects the executor, the pump, the poller and the housekeeper.

    execute(requests)      The main thread reads, checks and hands over each request; it never blocks and never raises. Text
                           goes to the text pool first, whose threads tokenise it and hand the request over.
    executor callback      The executor calls pump.deliver with each response.
    poller / stop request  They call _cancel, which calls executor.cancel_request; the engine's final Result ends the row.
    drain                  New requests are refused. Running ones may go on for a while, and then end with UNAVAILABLE.

A stream ends when the engine has ended all its rows, or when it fails as a whole.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from backend.api import (
    EngineConfig,
    EngineUnavailable,
    ErrorCode,
    EverbatchError,
    InvalidRequest,
    Request,
    RequestId,
    Response,
    Result,
)
from backend.api.telemetry import otlp_settings
from backend.serving.absence import Absence
from backend.serving.books import Books
from backend.serving.cancellation import CancellationPoller
from backend.serving.environment import Health
from backend.serving.free_parameters import FreeParameters
from backend.serving.housekeeper import Housekeeper
from backend.serving.load import EngineLoad
from backend.serving.protocols import EngineClient, TritonRequest
from backend.serving.pump import ResponsePump
from backend.serving.reading import Batch
from backend.serving.requests import (
    Parameters,
    ServingContext,
    Work,
    read_parameters,
    read_request_id,
)
from backend.serving.served_model import ServedModel
from backend.serving.stream import OutputRow, Stream
from backend.serving.submitting import submit
from backend.serving.suspects import Suspects
from backend.serving.text_pool import Job, TextPool
from backend.serving.trace_context import begin_trace
from backend.serving.traces import start_exporter

log = logging.getLogger("everbatch.serving")
SWITCH_INTERVAL_S = 0.0005  # After a round trip a sender waits at most this long for the interpreter's lock, not 5 ms.
OTHERS_MARGIN_S = 1.0  # The other models need this much more time to end their own streams when the grace is over.
NO_REQUEST_ID = "A request id must be provided for request cancellation"
SHUTTING_DOWN = "the server is shutting down; send the request to another one, or again when it is back"
NOT_READY = "the engine is not ready yet; try again in a few seconds"
STOPPED_EARLY = "the request was cancelled before its text had been read"
NOT_TAKEN_IN = "the request could not be taken in; see the server's log"
_END = Result([[]], is_final=True, is_sequence_final=True)
ANSWERED = Response(RequestId(0), result_or_none=_END)  # ends a row that needs no engine

T = TypeVar("T")


class ModelServer:
    def __init__(self, model: ServedModel, executor: EngineClient, config: EngineConfig) -> None:
        """Start all threads. Call it on the main thread, because it installs the drain signal."""
        self._model = model
        self._executor = executor
        self._config = config
        self._is_prepared = model.prepare()
        self._draining = False
        self._drain_ends: float | None = None
        triton, dialect = config.triton, model.dialect
        vllm_hello = (lambda: executor.hello) if model.reports_vllm else (lambda: None)
        is_static = config.scheduler.batching == "static"
        self._otlp = otlp_settings(config.telemetry)
        traces = None if self._otlp is None else start_exporter(self._otlp, dict(model.labels).get("model", ""))
        self._books = Books(dict(model.labels), triton.log_requests, model.owner, vllm_hello, is_static, traces)
        self._free_parameters = (
            None if dialect.reads_parameters else FreeParameters(model.tensors, triton.strict_parameters)
        )
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._pump = ResponsePump(
            triton.sender_threads,
            self._stop_rows,
            self._stop_at,
            self._books.ended.add,
            on_refused=self._books.ended.add_refused,
            coalesce=dialect.coalesces(config),
            dialect=dialect,
        )
        self._load = EngineLoad(config)
        self._absence = Absence(model.away_file, config.limits.max_queue_size)
        self._text = TextPool(triton.text_threads, triton.text_timeout_s, config.limits.max_queue_size)
        self._suspects = Suspects(model.reading_file)
        period_s = triton.cancellation_check_period_ms / 1000
        self._poller = CancellationPoller(self._pump.live_streams, self._abandon, period_s, dialect.log_name)
        self._housekeeper = Housekeeper(
            self._tick, triton.stats_period_ms / 1000, self._drain, self._orphaned, pulse=self._pulse
        )
        self._housekeeper.listen_for_drain()
        self._give_sign()
        self._poller.start()
        self._housekeeper.start()

    # ---- Triton's side -----------------------------------------------------------------------------------------------

    def execute(self, requests: Iterable[TritonRequest]) -> None:
        """Take in Triton requests. Whatever is wrong with one, it is answered through its response sender; nothing is raised."""
        for request in requests:
            try:
                stream = self._pump.open(request.get_response_sender())
            except Exception:
                # Without a sender this request cannot be answered. The other requests of the call must still be taken in.
                log.exception("a request came without a response sender")
                continue
            self._guarded(stream, self._accept, request)

    def is_ready(self) -> bool:
        """True if requests are served. Triton asks models for it from release 26.03 on."""
        return self._health() == "ready"

    def finalize(self) -> None:
        """End the threads, and the engine if this model owns it. Triton calls it once all requests have been answered."""
        if self._model.owner:
            self._wait_for_other_models()
        self._poller.stop()
        self._housekeeper.stop()
        self._report_unloading()
        self._text.close()
        self._model.close()
        self._suspects.close()
        self._pump.close()
        self._books.close(self._model.is_one_of_several and self._model.owner)
        self._executor.shutdown()

    def _report_unloading(self) -> None:
        """Report that no more signs of life are to be expected from this stub."""
        try:
            self._model.report_health("unloaded", 0, "")
        except OSError as error:  # The stub must end in any case; at worst the launcher takes it for dead.
            log.warning("the unloading of this model could not be reported: %s", error)

    def _wait_for_other_models(self) -> None:
        """Wait until no request runs in the engine, at most until the end of the grace.

        Triton ends each model as soon as its own requests are over, while requests of the text models may still need the engine.
        """
        deadline = (self._drain_ends or time.monotonic() + self._model.drain_grace_s) + OTHERS_MARGIN_S
        while time.monotonic() < deadline and self._executor.is_ready():
            stats = self._executor.latest_stats()
            if stats is None or stats.latest.num_active_requests == 0:
                return
            time.sleep(0.05)  # Polled, because the arrival of statistics wakes no thread.

    @property
    def num_live_streams(self) -> int:
        return len(self._pump.live_streams())

    # ---- main thread -------------------------------------------------------------------------------------------------

    def _accept(self, stream: Stream, request: TritonRequest) -> None:
        """Read a request, check it, hand it over. Raises EverbatchError; nothing of the request runs then."""
        stream.client_request_id = read_request_id(request)
        parameters = read_parameters(request, self._model.tensors)
        stream.namespace = parameters.namespace
        if self._otlp is not None:
            stream.trace = begin_trace(parameters.caller, self._otlp.sample_ratio)
        if self._free_parameters is not None:
            self._free_parameters.check(parameters.others)
        batch = Batch.read(self._model.tensors, request.inputs(), self._config.limits.max_request_batch)
        if batch.scalar("stop", 0):
            self._answer_stop(stream)
        elif (works := self._model.at_once(batch, self._executor)) is not None:
            self._hand_over(stream, works)
        elif self._draining or not self._absence.holds(
            batch, lambda: self._go_on(stream, batch, parameters), partial(self._pump.fail, stream)
        ):
            self._read(stream, batch, parameters)

    # ---- main thread, or the housekeeper -----------------------------------------------------------------------------

    def _go_on(self, stream: Stream, batch: Batch, parameters: Parameters) -> None:
        if not stream.is_over:
            self._guarded(stream, lambda stream, batch: self._read(stream, batch, parameters), batch)

    def _read(self, stream: Stream, batch: Batch, parameters: Parameters) -> None:
        """Check a request, and hand it over. Raises EverbatchError."""
        context = self._context()
        # A request that only stops sessions takes no place in the engine, but makes room there.
        if not all(batch.scalar("STOP", row) for row in range(batch.num_rows)):
            self._load.check()
        if self._model.check_text is None:
            self._hand_over(stream, self._model.parse(batch, context, parameters))
        else:
            self._model.check_text(batch, context)
            self._text.submit(self._text_job(stream, batch, context, parameters))

    def _context(self) -> ServingContext:
        """The context for parsing a request. Raises EngineUnavailable when no request can be served now.

        Token ids are parsed even while an engine that was there before does not answer, because the executor then refuses
        them with the exact reason. Text is not read for that.
        """
        if self._draining:
            raise EngineUnavailable(SHUTTING_DOWN)
        hello = self._executor.hello
        if hello is None or (self._model.check_text is not None and not self._executor.can_enqueue_requests()):
            raise EngineUnavailable(NOT_READY)
        config = self._model.configure(hello.config) if self._model.configure else self._config
        adapters = {**self._executor.adapters, **self._model.adapters}
        return ServingContext(
            config, hello.model, self._model.decoupled, hello.max_kv_tokens, self._model.parameters, adapters
        )

    def _text_job(self, stream: Stream, batch: Batch, context: ServingContext, parameters: Parameters) -> Job:
        batch.keep()
        ids = [batch.scalar("CORRID", row) for row in range(batch.num_rows)]

        def read() -> list[Work]:
            with self._suspects.reading(batch.digest(parameters.namespace)):
                return self._model.parse(batch, context, parameters)

        return Job(
            read,
            lambda works: self._guarded(stream, self._hand_over, works),
            lambda code, message: self._pump.fail(stream, code, message),
            wanted=lambda: not stream.is_over,
            num_bytes=batch.num_bytes,
            keys=frozenset((parameters.namespace, session_id) for session_id in ids if session_id is not None),
            namespace=parameters.namespace,
        )

    def _guarded(self, stream: Stream, action: Callable[[Stream, T], None], argument: T) -> None:
        """Call `action(stream, argument)`, and answer the stream with an error if it raises."""
        try:
            action(stream, argument)
        except EverbatchError as error:
            self._pump.refuse(stream, error.code, error.message)
        except Exception:
            # A fault of ours must not end the thread, nor leave its client without an answer.
            log.exception("taking in request %r failed", stream.client_request_id)
            self._pump.refuse(stream, ErrorCode.INTERNAL, NOT_TAKEN_IN)

    # ---- main thread, or a text thread -------------------------------------------------------------------------------

    def _hand_over(self, stream: Stream, works: list[Work]) -> None:
        """Start all rows of a stream, unless it is over by now."""
        rows = [_row_of(work) for work in works]
        if not self._pump.begin(stream, rows):
            return
        for work, row in zip(works, rows):
            self._submit(stream, row, work)
        if stream.is_over:  # The poller, a stop or the end of a drain has ended it meanwhile.
            self._stop_rows(stream)

    def _submit(self, stream: Stream, row: OutputRow, work: Work) -> None:
        """Start one row. If the executor refuses it, that is the row's error, and the other rows go on."""

        def on_response(response: Response) -> None:
            if response.is_final and isinstance(work.request, Request):
                self._load.leave()
            self._pump.deliver(stream, row, response)

        if work.request is None:
            self._pump.deliver(stream, row, ANSWERED)
            return
        try:
            if isinstance(work.request, Request):
                self._load.enter()
            row.request_id = submit(self._executor, work, stream.client_request_id, on_response)
        except EverbatchError as error:
            on_response(Response(RequestId(0), error_or_none=error.message, error_code=error.code))

    # ---- main thread -------------------------------------------------------------------------------------------------

    def _answer_stop(self, stream: Stream) -> None:
        """Cancel the newest live request with the id and the namespace of this `stop: true`.

        The answer is the same when there is no such request. Raises InvalidRequest when the id is empty.
        """
        if not stream.client_request_id:
            raise InvalidRequest(NO_REQUEST_ID)
        for candidate in reversed(self._pump.live_streams()):
            same_id = candidate.client_request_id == stream.client_request_id
            is_request = not candidate.answers_nothing and candidate is not stream  # A `stop: true` stops no other one.
            if is_request and same_id and candidate.namespace == stream.namespace:
                self._cancel(candidate)
                break
        self._pump.finish_empty(stream, self._model.dialect.stop_error)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def _cancel(self, stream: Stream) -> None:
        with stream.lock:
            if stream.cancelled:
                return
            stream.cancelled = True
            runs = bool(stream.rows)
        if runs:
            self._stop_rows(stream)
        else:  # The request waits for a text thread, or one is reading it.
            self._pump.fail(stream, ErrorCode.CANCELLED, STOPPED_EARLY)

    def _abandon(self, stream: Stream) -> None:
        stream.abandoned = True
        self._cancel(stream)

    def _stop_rows(self, stream: Stream) -> None:
        for row in stream.rows:
            if not row.ended and row.request_id is not None:
                self._executor.cancel_request(row.request_id)

    def _stop_at(self, row: OutputRow, sequence_index: int, num_output_tokens: int) -> None:
        assert row.request_id is not None, "a row that answered has an id"
        self._executor.cancel_request(row.request_id, num_output_tokens, sequence_index)

    # ---- housekeeper -------------------------------------------------------------------------------------------------

    def _health(self) -> Health:
        if self._draining:
            return "draining"
        if self._executor.has_given_up:
            return "given_up"
        if self._absence.notice() is not None and not self._text.is_stuck:
            return "ready"  # The engine is away on purpose, and requests are held or told why.
        can_serve = self._executor.is_ready() and self._is_prepared and not self._text.is_stuck
        return "ready" if can_serve else "unavailable"

    def _why_unavailable(self) -> str:
        if why := self._executor.why_not_ready():
            return why
        return "all text threads are stuck" if self._text.is_stuck else "the tokenizer is not loaded yet"

    def _give_sign(self) -> None:
        state = self._health()
        self._model.report_health(
            state, self.num_live_streams, self._why_unavailable() if state == "unavailable" else ""
        )

    def _pulse(self) -> None:
        self._give_sign()
        self._text.expire()
        is_ready = self._executor.is_ready()
        if (why := self._absence.look(is_ready and self._is_prepared)) and not is_ready:
            for stream in self._pump.live_streams():  # They have waited for an engine that does not come back.
                self._pump.fail(stream, ErrorCode.UNAVAILABLE, why)
                self._stop_rows(stream)
        self._books.publish_rows()
        self._is_prepared = self._is_prepared or self._model.prepare()  # Last, because it may raise.

    def _tick(self) -> None:
        if self._drain_ends is not None and time.monotonic() >= self._drain_ends:
            # This comes before the metrics, whose update may fail, because the streams must be ended in any case.
            for stream in self._pump.live_streams():
                self._pump.fail(stream, ErrorCode.UNAVAILABLE, SHUTTING_DOWN)
        self._books.publish_pauses(self._executor.pauses)
        self._books.publish_spans()
        if self._model.owner:
            self._books.publish_engine(self._executor.latest_stats(), self.is_ready())

    def _drain(self) -> None:
        log.warning("draining: %d requests may run for %.0f s more", self.num_live_streams, self._model.drain_grace_s)
        self._draining = True
        self._drain_ends = time.monotonic() + self._model.drain_grace_s
        self._give_sign()

    def _orphaned(self) -> None:
        """End the engine and this process within two seconds, because the server process is gone."""
        print("everbatch: the server process is gone, ending", file=sys.stderr, flush=True)
        worker = threading.Thread(target=self._executor.shutdown, daemon=True)
        worker.start()
        worker.join(timeout=2)
        os._exit(1)


def _row_of(work: Work) -> OutputRow:
    if not isinstance(work.request, Request):
        return OutputRow(work.output, is_request=False)
    config = work.request.sampling_config
    num_sequences = config.num_return_sequences or config.beam_width
    return OutputRow(work.output, len(work.request.input_token_ids), num_sequences, takes_long=work.takes_long)
