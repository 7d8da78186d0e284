"""An executor that answers as the test says, from one reader thread like the real one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from backend.api import (
    EngineConfig,
    EngineStats,
    EngineUnavailable,
    ErrorCode,
    EverbatchError,
    FinishReason,
    Request,
    RequestId,
    Response,
    Result,
    SessionId,
)
from backend.api.live_view import LiveView, Quantiles
from backend.api.stats import EngineCounters, IterationStats, PauseCounts
from backend.core.messages import Hello, Resume
from backend.core.step import ModelInfo
from backend.serving.stream import OutputRow, Stream

OnResponse = Callable[[Response], None]
MODEL = ModelInfo("scripted", vocab_size=100, max_seq_len=64, eos_ids=(99,))


def acquire(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=20)


class ScriptedExecutor:
    """`submit` keeps the request; the test calls `tokens`, `end`, `error`. A cancelled request ends by itself, as in
    the engine.
    """

    def __init__(self, model: ModelInfo = MODEL, model_path: str = "") -> None:
        self.hello: Hello | None = Hello(1, model, model_path, EngineConfig())
        self.adapters: dict[str, str] = {}
        self.pauses = PauseCounts()
        self.named: list[tuple[str, str | None]] = []
        self.requests: dict[RequestId, Request] = {}
        self.live: dict[RequestId, OnResponse] = {}
        self.resumes: list[Resume | None] = []
        self.cancelled: list[tuple[RequestId, int | None]] = []
        self.cancelled_sequences: list[int | None] = []  # of each of these calls
        self.stopped_sessions: list[tuple[SessionId, bool, str]] = []
        self.has_given_up = False
        self.refuse: list[EverbatchError | None] = []  # answers to the next submits, in order
        self.stats: EngineStats | None = None
        self.was_shut_down = False
        self.submitted = threading.Semaphore(0)
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # ---- the executor's interface ----

    def submit(self, request: Request, on_response: OnResponse, resume: Resume | None = None) -> RequestId:
        if self.refuse and (error := self.refuse.pop(0)) is not None:
            raise error
        if self.has_given_up or not self.is_ready():  # refuses as the real one does, in its own words
            raise EngineUnavailable("the engine was given up" if self.has_given_up else "no sign of life")
        request_id = RequestId(len(self.requests) + 1)
        self.requests[request_id] = request
        self.resumes.append(resume)
        self.live[request_id] = on_response
        self.submitted.release()
        return request_id

    def cancel_request(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None:
        self.cancelled.append((request_id, keep_output_tokens))
        self.cancelled_sequences.append(sequence_index)
        several = (self.requests[request_id].sampling_config.num_return_sequences or 1) > 1
        goes_on = several and sequence_index is not None  # the other sequences do
        self.end(request_id, reason=FinishReason.CANCELLED, is_final=not goes_on, sequence_index=sequence_index or 0)

    def stop_session(self, session_id: SessionId, end: bool, on_response: OnResponse, namespace: str = "") -> RequestId:
        self.stopped_sessions.append((session_id, end, namespace))
        request_id = RequestId(10_000 + len(self.stopped_sessions))
        self.live[request_id] = on_response
        self._put(request_id, Response(request_id, result_or_none=Result([[]], is_final=True)))
        return request_id

    def name_adapter(self, name: str, directory: str | None, on_response: OnResponse) -> RequestId:
        """Adapters that are called `bad` are refused."""
        self.named.append((name, directory))
        request_id = RequestId(20_000 + len(self.named))
        self.live[request_id] = on_response
        if name == "bad":
            self.error(request_id, "it is bad", ErrorCode.INVALID_ARGUMENT)
        else:
            self._put(request_id, Response(request_id, result_or_none=Result([[]], is_final=True)))
        return request_id

    def look(self, on_response: OnResponse) -> RequestId:
        """An engine without requests, whose pool has seven blocks."""
        request_id = RequestId(30_000)
        self.live[request_id] = on_response
        view = LiveView(
            "e", 0, 1.0, IterationStats(), EngineCounters(), Quantiles(), Quantiles(), [], [], 0, [], 0, [-2, 7], 1, 7
        )
        self._put(request_id, Response(request_id, result_or_none=Result([[]], is_final=True, live_view=view)))
        return request_id

    def latest_stats(self) -> EngineStats | None:
        return self.stats

    def why_not_ready(self) -> str:
        return "" if self.is_ready() else "no sign of life"

    def can_enqueue_requests(self) -> bool:
        return self.is_ready()

    def is_ready(self) -> bool:
        return self.hello is not None and not self.was_shut_down

    def shutdown(self) -> None:
        self.was_shut_down = True
        self._queue.put(None)
        self._reader.join(5)

    # ---- the script ----

    def tokens(self, request_id: int, *ids: int, **fields: object) -> None:
        self._put(request_id, Response(RequestId(request_id), result_or_none=Result([list(ids)], **fields)))

    def end(self, request_id: int, *ids: int, reason: FinishReason = FinishReason.LENGTH, **fields: object) -> None:
        fields = {"is_final": True, **fields}
        result = Result([list(ids)], is_sequence_final=True, finish_reasons=[reason], **fields)
        self._put(request_id, Response(RequestId(request_id), result_or_none=result))

    def error(self, request_id: int, message: str, code: ErrorCode = ErrorCode.UNAVAILABLE) -> None:
        self._put(request_id, Response(RequestId(request_id), error_or_none=message, error_code=code))

    def settle(self) -> None:
        """Wait until all that was said has been told to the callbacks."""
        if not self.was_shut_down:
            settled = threading.Event()
            self._queue.put(settled)
            assert settled.wait(20)

    def _put(self, request_id: int, response: Response) -> None:
        self._queue.put((request_id, response))

    def _read(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            request_id, response = item
            on_response = self.live.get(request_id)
            if on_response is None:  # it has ended: exactly one final response per request
                continue
            if response.is_final:
                del self.live[request_id]
            on_response(response)


class NoEngineRows:
    """Takes the place of EngineRows for a pump without an engine: `stop(stream)` is called for each stream that is stopped."""

    def __init__(self, stop: Callable[[Stream], None] = lambda stream: None) -> None:
        self.stop = stop

    def stop_at(self, row: OutputRow, sequence_index: int, num_output_tokens: int) -> None:
        pass
