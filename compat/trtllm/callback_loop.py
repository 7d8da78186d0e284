"""CallbackLoop: runs an EngineCore in a thread that talks to the program through callbacks; GptManager is made of it.

The constructor starts a worker thread that runs the token loop. Each iteration calls in this order:

    get_requests(max_count)          returns the new requests, at most `max_count`
    EngineCore.step()                runs one step of the persistent batch
    send_response(id, response, is_final, error)     gets each response; all state of an id is gone before its final one
    poll_stop_signals()              returns the ids of requests to be ended; unknown ids are ignored
    return_stats(stats)              gets the statistics, only if a request was active

The caller chooses the ids: any unsigned 64-bit number that is not in use by a live request.

A callback that raises, or returns a wrong value, is logged once until it succeeds again, and the token loop goes on. A request
that is no Request, or has fields of wrong types, is answered with an error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from backend.api.config.schema import EngineConfig
from backend.api.errors import InvalidRequest
from backend.api.field_types import with_checked_types
from backend.api.limits import UINT64
from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats
from backend.engine.core import EngineCore
from backend.executor.load import with_model_path, workers_of

log = logging.getLogger("everbatch.executor")
GetRequests = Callable[[int], Iterable[tuple[int, Request]]]
SendResponse = Callable[[int, Response | None, bool, str], None]
PollStopSignals = Callable[[], Iterable[int]]
ReturnStats = Callable[[EngineStats], None]


def load_engine(
    model_path: str, config: EngineConfig, logits_post_processors: Mapping[str, Callable[..., Any]] | None = None
) -> EngineCore:
    """An engine for a CallbackLoop, with the checkpoint in a directory. Raises ConfigError when there is none."""
    config = with_model_path(config, model_path)
    return EngineCore(config, workers_of(config, logits_post_processors))


class CallbackLoop:
    def __init__(
        self,
        core: EngineCore,
        get_requests: GetRequests,
        send_response: SendResponse,
        poll_stop_signals: PollStopSignals = lambda: (),
        return_stats: ReturnStats = lambda stats: None,
        idle_period_s: float = 0.001,
        ending: threading.Event | None = None,
    ) -> None:
        """The worker thread calls all callbacks. While nothing is active it polls for requests every `idle_period_s` seconds.

        `ending`: once it is set, by a callback for instance, the thread accepts no more requests, and ends after the active ones.
        """
        self._core = core
        self._get_requests = get_requests
        self._send_response = send_response
        self._poll_stop_signals = poll_stop_signals
        self._return_stats = return_stats
        self._idle_period_s = idle_period_s
        self._ending = ending or threading.Event()
        self._failing: set[str] = set()  # callbacks that failed when they were called last
        self.worker_thread = threading.Thread(target=self._run, name="gpt-manager", daemon=True)
        self.worker_thread.start()

    def shutdown(self) -> None:
        """Accept no more requests, finish the active ones, and end the worker thread."""
        self._ending.set()
        self.worker_thread.join()

    def __enter__(self) -> CallbackLoop:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _run(self) -> None:
        while self._core.has_work or self._core.preparation or not self._ending.is_set():
            if not self._ending.is_set():
                self._take_in()
            was_active = self._core.has_work
            self._send(self._core.step())
            self._stop_signalled()
            if was_active:
                with self._callback("return_stats"):
                    self._return_stats(self._core.stats())
            else:
                self._ending.wait(self._idle_period_s)
        self._core.workers.shutdown()

    def _take_in(self) -> None:
        room = self._core.config.limits.max_queue_size - len(self._core.scheduler.waiting)
        self._core.begin_poll()
        with self._callback("get_requests"):
            for request_id, request in self._get_requests(max(0, room)):
                self._enqueue(request_id, request)

    def _enqueue(self, request_id: int, request: Request) -> None:
        if not isinstance(request_id, int) or not 0 <= request_id < UINT64:
            log.error("get_requests returned a request whose id is no unsigned 64-bit number; the request is dropped")
            return
        try:
            request = with_checked_types(request)
        except InvalidRequest as error:
            self._core.refuse(RequestId(request_id), None, error)
        else:
            self._core.enqueue(RequestId(request_id), request)

    def _stop_signalled(self) -> None:
        with self._callback("poll_stop_signals"):
            for request_id in self._poll_stop_signals():
                self._core.cancel(RequestId(request_id))
        self._send(self._core.take_responses())

    def _send(self, responses: list[Response]) -> None:
        for response in responses:
            error = response.error_msg if response.has_error() else ""
            with self._callback("send_response"):
                self._send_response(response.request_id, None if error else response, response.is_final, error)

    @contextmanager
    def _callback(self, name: str) -> Iterator[None]:
        """Log an exception of the program's callback, because it must not end the thread that serves all requests."""
        try:
            yield
        except (Exception, SystemExit) as error:
            if name not in self._failing:
                self._failing.add(name)
                log.error("the callback %s failed; the token loop goes on", name, exc_info=error)
        else:
            self._failing.discard(name)
