"""GptManager: TensorRT-LLM's older callback interface over the same engine (docs/features.md, 001).

A worker thread, spawned by the constructor, runs the token loop. Each iteration, in this order:

    get_inference_requests(max_count)    new requests; -1 = as many as you like
    ... one step of the persistent batch ...
    send_response(id, response, is_final, error)     for whatever became ready; all state of a final id is gone by then
    poll_stop_signals()                  ids to end properly; unknown ones are ignored
    return_stats(stats)                  only while there are active requests

The ids are the caller's: any unsigned 64-bit number that is not being processed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats
from backend.engine.core import EngineCore

GetRequests = Callable[[int], Iterable[tuple[int, Request]]]
SendResponse = Callable[[int, Response | None, bool, str], None]
PollStopSignals = Callable[[], Iterable[int]]
ReturnStats = Callable[[EngineStats], None]


class GptManager:
    def __init__(
        self,
        core: EngineCore,
        get_requests: GetRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals = lambda: (),
        return_stats: ReturnStats = lambda stats: None,
        idle_period_s: float = 0.001,
    ):
        """All callbacks are called from the worker thread. `idle_period_s`: pause between polls while nothing is active."""
        self._core = core
        self._get_requests = get_requests
        self._send_response = send_response
        self._poll_stop_signals = poll_stop_signals
        self._return_stats = return_stats
        self._idle_period_s = idle_period_s
        self._ending = threading.Event()
        self.worker_thread = threading.Thread(target=self._run, name="gpt-manager", daemon=True)
        self.worker_thread.start()

    def shutdown(self) -> None:
        """Accept nothing more, finish what is active, end the worker thread."""
        self._ending.set()
        self.worker_thread.join()

    def __enter__(self) -> GptManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        while self._core.has_work or not self._ending.is_set():
            if not self._ending.is_set():
                self._take_in()
            was_active = self._core.has_work
            self._send(self._core.step())
            self._stop_signalled()
            if was_active:
                self._return_stats(self._core.stats())
            else:
                self._ending.wait(self._idle_period_s)
        self._core.workers.shutdown()

    def _take_in(self) -> None:
        room = self._core.config.limits.max_queue_size - len(self._core.scheduler.waiting)
        self._core.begin_poll()
        for request_id, request in self._get_requests(max(0, room)):
            self._core.enqueue(RequestId(request_id), request)

    def _stop_signalled(self) -> None:
        for request_id in self._poll_stop_signals():
            self._core.cancel(RequestId(request_id))
        self._send(self._core.take_responses())

    def _send(self, responses: list[Response]) -> None:
        for response in responses:
            error = response.error_msg if response.has_error() else ""
            self._send_response(response.request_id, None if error else response, response.is_final, error)
