"""ModelServer: one Triton model in its stub process. Ties the executor, the pump, the poller and the housekeeper
together.

    execute(requests)      main thread: read -> check -> hand over each request; never blocks, never raises
    executor callback      -> pump.deliver
    poller / stop request  -> _cancel -> executor.cancel_request; the row then ends with the engine's final Result
    drain                  refuse new requests, wait for the running ones, then end them with UNAVAILABLE

A stream ends because all its rows have ended (the engine says so), or because it failed as a whole.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from backend.api import (
    EngineConfig,
    EngineStats,
    EngineUnavailable,
    ErrorCode,
    EverbatchError,
    InvalidRequest,
    Request,
    RequestId,
    Response,
    SessionId,
)
from backend.serving import pb
from backend.serving.cancellation import CancellationPoller
from backend.serving.housekeeper import Housekeeper
from backend.serving.metrics import MetricsPublisher
from backend.serving.pump import ResponsePump, Row, Stream
from backend.serving.reading import Batch
from backend.serving.requests import Parameters, ServingContext, StopSession, Work, parse_parameters
from backend.serving.tensors import ModelTensors

log = logging.getLogger("everbatch.serving")
SWITCH_INTERVAL_S = 0.0005  # a sender that comes back from a round trip waits this long for the GIL, not 5 ms
OTHERS_MARGIN_S = 1.0  # so that the other models end their own streams at the end of the grace
NO_REQUEST_ID = "A request id must be provided for request cancellation"
SHUTTING_DOWN = "the server is shutting down; send the request to another one, or again when it is back"

OnResponse = Callable[[Response], None]
Parse = Callable[[Batch, ServingContext, Parameters], list[Work]]


class EngineClient(Protocol):
    """backend.executor.Executor, as far as it is used here."""

    @property
    def hello(self) -> Any: ...

    def submit(self, request: Request, on_response: OnResponse) -> RequestId: ...

    def cancel_request(self, request_id: RequestId, keep_output_tokens: int | None = None) -> None: ...

    def stop_session(self, session_id: SessionId, end: bool, on_response: OnResponse) -> RequestId: ...

    def latest_stats(self) -> EngineStats | None: ...

    def is_ready(self) -> bool: ...

    def shutdown(self) -> None: ...


class ModelServer:
    def __init__(
        self,
        tensors: ModelTensors,
        parse: Parse,
        executor: EngineClient,
        config: EngineConfig,
        *,
        decoupled: bool = True,
        owner: bool = False,
        labels: dict[str, str] | None = None,
        drain_grace_s: float = 10.0,
        prepare: Callable[[], None] = lambda: None,
    ):
        """Start all threads. Call on the main thread (it installs the drain signal).

        `parse` turns a batch into work; `prepare` is called with every housekeeping tick and may load what parsing
        needs once the engine is there. `owner`: this model publishes the engine's metrics.
        """
        self._tensors = tensors
        self._parse = parse
        self._executor = executor
        self._config = config
        self._decoupled = decoupled
        self._owner = owner
        self._drain_grace_s = drain_grace_s
        self._prepare = prepare
        self._draining = False
        self._drain_ends: float | None = None
        self._finished: deque[tuple[int, int]] = deque()  # token lengths of rows that ended, for the histograms
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._pump = ResponsePump(config.triton.sender_threads, self._stop_rows, self._stop_at, self._on_row_end)
        self._metrics = MetricsPublisher(pb.new_metric_family, labels or {}, engine=owner)
        period_s = config.triton.cancellation_check_period_ms / 1000
        self._poller = CancellationPoller(self._pump.live_streams, self._abandon, period_s)
        self._housekeeper = Housekeeper(self._tick, config.triton.stats_period_ms / 1000, self._drain, self._orphaned)
        self._housekeeper.listen_for_drain()
        self._poller.start()
        self._housekeeper.start()

    # ---- Triton's side -----------------------------------------------------------------------------------------------

    def execute(self, requests: Iterable[Any]) -> None:
        """Take in Triton requests. Each is answered through its response sender, once and for all, whatever is wrong
        with it.
        """
        for request in requests:
            stream = self._pump.open(request.get_response_sender(), str(request.request_id()), [])
            try:
                self._accept(stream, request)
            except EverbatchError as error:
                self._pump.fail(stream, error.code, error.message)
            except Exception:
                log.exception("taking in request %r failed", stream.client_request_id)
                self._pump.fail(stream, ErrorCode.INTERNAL, "the request could not be taken in; see the server's log")

    def is_ready(self) -> bool:
        """For servers that ask a model (Triton 26.03)."""
        return self._executor.is_ready() and not self._draining

    def finalize(self) -> None:
        """All requests of this model have been answered; end the threads, and the engine if this model owns it."""
        if self._owner:
            self._wait_for_other_models()
        self._poller.stop()
        self._housekeeper.stop()
        self._pump.close()
        self._executor.shutdown()

    def _wait_for_other_models(self) -> None:
        """Triton ends each model as soon as its own requests are over; the text models' may still need the engine."""
        deadline = (self._drain_ends or time.monotonic() + self._drain_grace_s) + OTHERS_MARGIN_S
        while time.monotonic() < deadline and self._executor.is_ready():
            stats = self._executor.latest_stats()
            if stats is None or stats.latest.num_active_requests == 0:
                return
            time.sleep(0.05)

    @property
    def num_live_streams(self) -> int:
        return len(self._pump.live_streams())

    # ---- main thread -------------------------------------------------------------------------------------------------

    def _accept(self, stream: Stream, request: Any) -> None:
        """Read, check, hand over. Raises EverbatchError; then nothing of the request runs."""
        batch = Batch.read(self._tensors, request.inputs(), self._config.limits.max_request_batch)
        if batch.scalar("stop", 0):
            self._answer_stop(stream)
            return
        if self._draining:
            raise EngineUnavailable(SHUTTING_DOWN)
        hello = self._executor.hello
        if hello is None:
            raise EngineUnavailable("the engine is not ready yet; try again in a few seconds")
        parameters = parse_parameters(request.timeout(), request.parameters())
        context = ServingContext(self._config, hello.model, self._decoupled)
        works = self._parse(batch, context, parameters)
        # the rows are all there before the first can answer: the end of the stream is the end of all of them
        stream.rows.extend(Row(work.output, _num_input_tokens(work)) for work in works)
        for work, row in zip(works, stream.rows):
            self._submit(stream, row, work)
        if stream.cancelled or stream.failure is not None:  # meanwhile, by the poller or the end of a drain
            self._stop_rows(stream)

    def _submit(self, stream: Stream, row: Row, work: Work) -> None:
        """Start one row. What the executor refuses at once becomes the row's error; other rows go on."""

        def on_response(response: Response) -> None:
            self._pump.deliver(stream, row, response)

        try:
            if isinstance(work.request, StopSession):
                row.request_id = self._executor.stop_session(work.request.session_id, work.request.end, on_response)
            else:
                row.request_id = self._executor.submit(work.request, on_response)
        except EverbatchError as error:
            on_response(Response(RequestId(0), error_or_none=error.message, error_code=error.code))

    def _answer_stop(self, stream: Stream) -> None:
        """`stop: true` cancels the newest live request of the same id; the answer is empty, also for an unknown id."""
        if not stream.client_request_id:
            raise InvalidRequest(NO_REQUEST_ID)
        for candidate in reversed(self._pump.live_streams()):
            if candidate is not stream and candidate.client_request_id == stream.client_request_id:
                self._cancel(candidate)
                break
        self._pump.finish_empty(stream)

    # ---- any thread --------------------------------------------------------------------------------------------------

    def _cancel(self, stream: Stream) -> None:
        with stream.lock:
            if stream.cancelled:
                return
            stream.cancelled = True
        self._stop_rows(stream)

    def _abandon(self, stream: Stream) -> None:
        stream.abandoned = True
        self._cancel(stream)

    def _stop_rows(self, stream: Stream) -> None:
        for row in stream.rows:
            if not row.ended and row.request_id is not None:
                self._executor.cancel_request(row.request_id)

    def _stop_at(self, row: Row, num_output_tokens: int) -> None:
        assert row.request_id is not None, "a row that answered has an id"
        self._executor.cancel_request(row.request_id, keep_output_tokens=num_output_tokens)

    def _on_row_end(self, row: Row) -> None:
        self._finished.append((row.num_input_tokens, row.output.num_output_tokens))

    # ---- housekeeper -------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._prepare()
        finished = [self._finished.popleft() for _ in range(len(self._finished))]
        self._metrics.publish_lengths(finished)
        if self._owner:
            self._metrics.publish_engine(self._executor.latest_stats(), self.is_ready())
        if self._drain_ends is not None and time.monotonic() >= self._drain_ends:
            for stream in self._pump.live_streams():
                self._pump.fail(stream, ErrorCode.UNAVAILABLE, SHUTTING_DOWN)

    def _drain(self) -> None:
        log.warning("draining: %d requests may run for %.0f s more", self.num_live_streams, self._drain_grace_s)
        self._draining = True
        self._drain_ends = time.monotonic() + self._drain_grace_s

    def _orphaned(self) -> None:
        """The server process is gone and nobody listens: end the engine and this process, within two seconds."""
        print("everbatch: the server process is gone, ending", file=sys.stderr, flush=True)
        worker = threading.Thread(target=self._executor.shutdown, daemon=True)
        worker.start()
        worker.join(timeout=2)
        os._exit(1)


def _num_input_tokens(work: Work) -> int:
    return 0 if isinstance(work.request, StopSession) else len(work.request.input_token_ids)


def is_decoupled(model_config: str) -> bool:
    """The transaction policy in the `model_config` argument of initialize()."""
    return bool(json.loads(model_config).get("model_transaction_policy", {}).get("decoupled", False))
