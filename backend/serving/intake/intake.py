"""RequestIntake: the way of a Triton request into the engine. Three steps, in the order in which they run:

    read      its id, parameters and arrays as checked Python values
    check     whether it can be served now; text then goes to the text pool, whose threads tokenise it
    submit    each row to the executor, which answers the stream's rows from then on

The main thread runs all three, the text threads the last one for text. Whatever is wrong with a request is the answer of its
stream; nothing is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from backend.api import EngineConfig, EngineUnavailable, ErrorCode, EverbatchError, Request, RequestId, Response, Result
from backend.api.config.telemetry import otlp_settings
from backend.serving.intake.batch import Batch
from backend.serving.intake.free_parameters import FreeParameters
from backend.serving.intake.load import EngineLoad
from backend.serving.intake.requests import Parameters, ServingContext, read_parameters, read_request_id
from backend.serving.intake.submit import submit
from backend.serving.intake.suspects import Suspects
from backend.serving.intake.text_pool import TextJob, TextPool
from backend.serving.lifecycle.absence import Absence
from backend.serving.lifecycle.drain import SHUTTING_DOWN, Drain
from backend.serving.observe.trace_context import begin_trace
from backend.serving.protocols import EngineClient, TritonRequest
from backend.serving.served_model import ServedModel
from backend.serving.stream import Answers, OutputRow, Stream
from backend.serving.work import Work

log = logging.getLogger("everbatch.serving")
NOT_READY = "the engine is not ready yet; try again in a few seconds"
NOT_TAKEN_IN = "the request could not be taken in; see the server's log"
_END = Result([[]], is_final=True, is_sequence_final=True)
ANSWERED = Response(RequestId(0), result_or_none=_END)  # ends a row that needs no engine

T = TypeVar("T")


class Incoming(NamedTuple):
    """A Triton request that has been read."""

    stream: Stream
    batch: Batch
    parameters: Parameters


class RequestIntake:
    def __init__(
        self,
        model: ServedModel,
        executor: EngineClient,
        config: EngineConfig,
        answers: Answers,
        absence: Absence,
        drain: Drain,
    ) -> None:
        self._model, self._executor, self._config = model, executor, config
        self._answers, self._absence, self._drain = answers, absence, drain
        otlp = otlp_settings(config.telemetry)
        self._trace_ratio = None if otlp is None else otlp.sample_ratio
        self._free_parameters = (
            None if model.dialect.reads_parameters else FreeParameters(model.tensors, config.triton.strict_parameters)
        )
        self._load = EngineLoad(config)
        self.text = TextPool(config.triton.text_threads, config.triton.text_timeout_s, config.limits.max_queue_size)
        self._suspects = Suspects(model.reading_file)

    def take(self, stream: Stream, request: TritonRequest) -> None:
        """Take in a request whose answers go to `stream`. Never blocks, never raises. Called on the main thread."""
        self._guarded(stream, self._take, request)

    def close(self) -> None:
        """End the text threads once they have read what is queued."""
        self.text.close()
        self._model.close()
        self._suspects.close()

    def _take(self, stream: Stream, request: TritonRequest) -> None:
        incoming = self._read(stream, request)
        batch = incoming.batch
        if batch.scalar("stop", 0):
            self._answers.answer_stop(stream)
        elif (works := self._model.at_once(batch, self._executor)) is not None:
            self._submit(stream, works)
        elif self._drain.is_on or not self._absence.holds(
            batch, partial(self._go_on, incoming), partial(self._answers.fail, stream)
        ):
            self._check(incoming)

    def _go_on(self, incoming: Incoming) -> None:
        """Check a request that has waited for the engine. Called on the housekeeper's thread."""
        if not incoming.stream.is_over:
            self._guarded(incoming.stream, lambda stream, incoming: self._check(incoming), incoming)

    # ---- 1. read -----------------------------------------------------------------------------------------------------

    def _read(self, stream: Stream, request: TritonRequest) -> Incoming:
        """Raises EverbatchError; nothing of the request runs then."""
        stream.client_request_id = read_request_id(request)
        parameters = read_parameters(request, self._model.tensors)
        stream.namespace = parameters.namespace
        if self._trace_ratio is not None:
            stream.trace = begin_trace(parameters.caller, self._trace_ratio)
        if self._free_parameters is not None:
            self._free_parameters.check(parameters.others)
        batch = Batch.read(self._model.tensors, request.inputs(), self._config.limits.max_request_batch)
        return Incoming(stream, batch, parameters)

    # ---- 2. check ----------------------------------------------------------------------------------------------------

    def _check(self, incoming: Incoming) -> None:
        """Token ids are parsed at once, text is queued for the text threads. Raises EverbatchError."""
        stream, batch, parameters = incoming
        context = self._context()
        # A request that only stops sessions takes no place in the engine, but makes room there.
        if not all(batch.scalar("STOP", row) for row in range(batch.num_rows)):
            self._load.check()
        if self._model.check_text is None:
            self._submit(stream, self._model.parse(batch, context, parameters))
        else:
            self._model.check_text(batch, context)
            self.text.submit(self._text_job(incoming, context))

    def _context(self) -> ServingContext:
        """The context for parsing a request. Raises EngineUnavailable when no request can be served now.

        Token ids are parsed even while an engine that was there before does not answer, because the executor then refuses
        them with the exact reason. Text is not read for that.
        """
        if self._drain.is_on:
            raise EngineUnavailable(SHUTTING_DOWN)
        hello = self._executor.hello
        if hello is None or (self._model.check_text is not None and not self._executor.can_enqueue_requests()):
            raise EngineUnavailable(NOT_READY)
        config = self._model.configure(hello.config) if self._model.configure else self._config
        adapters = {**self._executor.adapters, **self._model.adapters}
        return ServingContext(
            config, hello.model, self._model.decoupled, hello.max_kv_tokens, self._model.parameters, adapters
        )

    def _text_job(self, incoming: Incoming, context: ServingContext) -> TextJob:
        stream, batch, parameters = incoming
        batch.keep()
        ids = [batch.scalar("CORRID", row) for row in range(batch.num_rows)]

        def read() -> list[Work]:
            with self._suspects.reading(batch.digest(parameters.namespace)):
                return self._model.parse(batch, context, parameters)

        return TextJob(
            read,
            lambda works: self._guarded(stream, self._submit, works),
            lambda code, message: self._answers.fail(stream, code, message),
            wanted=lambda: not stream.is_over,
            num_bytes=batch.num_bytes,
            keys=frozenset((parameters.namespace, session_id) for session_id in ids if session_id is not None),
            namespace=parameters.namespace,
        )

    # ---- 3. submit ---------------------------------------------------------------------------------------------------

    def _submit(self, stream: Stream, works: list[Work]) -> None:
        """Start all rows of a stream, unless it is over by now."""
        rows = [OutputRow.of(work) for work in works]
        if not self._answers.begin(stream, rows):
            return
        for work, row in zip(works, rows):
            self._submit_row(stream, row, work)
        if stream.is_over:  # The poller, a stop or the end of a drain has ended it meanwhile.
            self._answers.stop_rows(stream)

    def _submit_row(self, stream: Stream, row: OutputRow, work: Work) -> None:
        """Start one row. If the executor refuses it, that is the row's error, and the other rows go on."""
        is_counted = isinstance(work.request, Request) and not work.request.is_background

        def on_response(response: Response) -> None:
            if response.is_final and is_counted:
                self._load.leave()
            self._answers.deliver(stream, row, response)

        if work.request is None:
            self._answers.deliver(stream, row, ANSWERED)
            return
        try:
            if is_counted:
                self._load.enter()
            row.request_id = submit(self._executor, work, stream.client_request_id, on_response)
        except EverbatchError as error:
            on_response(Response(RequestId(0), error_or_none=error.message, error_code=error.code))

    def _guarded(self, stream: Stream, action: Callable[[Stream, T], None], argument: T) -> None:
        """Call `action(stream, argument)`, and answer the stream with an error if it raises."""
        try:
            action(stream, argument)
        except EverbatchError as error:
            self._answers.refuse(stream, error.code, error.message)
        except Exception:
            # A fault of ours must not end the thread, nor leave its client without an answer.
            log.exception("taking in request %r failed", stream.client_request_id)
            self._answers.refuse(stream, ErrorCode.INTERNAL, NOT_TAKEN_IN)
