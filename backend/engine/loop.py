"""EngineLoop: drives an EngineCore from a thread-safe inbox. One thread runs it; any thread may post.

Each iteration applies all commands that have arrived, runs a step if there is work, and delivers the responses. Without work the
loop sleeps until a command arrives or a deadline is due.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from backend.api.errors import EngineUnavailable
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.messages import CLIENT_SHIFT, Cancel, ClientGone, Command, NameAdapter, StopSession, Submit
from backend.engine.core import EngineCore

MAX_IDLE_S = 1.0
Deliver = Callable[[list[Response]], None]
PublishStats = Callable[[EngineStats], None]
PublishRecords = Callable[[Records], None]
InboxItem = Command | ClientGone | Future[EngineStats] | None
PublishAdapters = Callable[[Mapping[str, str]], None]


class EngineLoop:
    def __init__(self, core: EngineCore, stats_period_s: float = 1.0) -> None:
        self._core = core
        self._stats_period_s = stats_period_s
        self._next_stats = 0.0
        self._inbox: queue.SimpleQueue[tuple[InboxItem, int]] = queue.SimpleQueue()
        core.preparation.on_ready(self._wake)
        core.names.on_outcome(self._wake)
        self._stopping = False
        self._drain = False
        self._num_iterations = 0
        # Number of the present iteration, None while the loop sleeps; any thread may read it.
        self.present_iteration: int | None = None

    def post(self, command: Command | ClientGone) -> None:
        """Post a command; it is applied before the next step. The queue time and the deadline of a request count from now."""
        self._inbox.put((command, self._core.clock.monotonic_ns()))

    def ask_stats(self) -> Future[EngineStats]:
        """Ask for statistics, taken between two steps. A loop that has ended never answers."""
        future: Future[EngineStats] = Future()
        self._inbox.put((future, 0))
        return future

    def stop(self, drain: bool = False) -> None:
        """Make `run` return soon. `drain`: only after all live requests have ended; otherwise they end with an error."""
        self._drain = drain
        self._stopping = True
        self._wake()

    def run(
        self,
        deliver: Deliver,
        publish_stats: PublishStats = lambda stats: None,
        publish_records: PublishRecords = lambda records: None,
        publish_adapters: PublishAdapters = lambda adapters: None,
    ) -> None:
        """Serve until `stop`. Every live request has been answered when it returns or raises.

        The callbacks run on this thread and must not block. Records are published before the responses of the same steps, names
        of adapters before the response to the command that changed them.
        """
        farewell = "the engine has failed; its log says why"
        try:
            while True:
                self._begin_iteration()
                self._poll()
                if self._is_over:
                    farewell = "the engine is shutting down; send the request again later"
                    break
                responses = self._core.step() if self._core.has_work else self._core.take_responses()
                records = self._core.take_records()
                if records is not None:
                    publish_records(records)
                adapters = self._core.names.take_change()
                if adapters is not None:
                    publish_adapters(adapters)
                if responses:
                    deliver(responses)
                self._report(publish_stats)
        finally:
            self._core.names.close(EngineUnavailable(farewell))
            self._core.fail_all(EngineUnavailable(farewell))
            deliver(self._core.take_responses())
            self.present_iteration = None

    @property
    def _is_over(self) -> bool:
        """True once the loop is stopped and, if it drains, no request is live."""
        return self._stopping and not (self._drain and (self._core.has_work or self._core.preparation))

    def _begin_iteration(self) -> None:
        self._num_iterations += 1
        self.present_iteration = self._num_iterations

    def _poll(self) -> None:
        self._core.begin_poll()
        if not (self._core.has_work or self._is_over):
            try:
                self._apply(*self._sleep())
            except queue.Empty:
                self._core.expire()
        while not self._inbox.empty():
            self._apply(*self._inbox.get())
        self._core.names.answer()
        if not self._core.has_work:
            self._core.admit()

    def _wake(self) -> None:
        self._inbox.put((None, 0))

    def _sleep(self) -> tuple[InboxItem, int]:
        """Wait for a command. Raises queue.Empty after MAX_IDLE_S, or when a request's deadline is due."""
        earliest_ns, idle_s = self._core.preparation.earliest_deadline_ns, MAX_IDLE_S
        if earliest_ns is not None:
            idle_s = min(idle_s, max(0.0, (earliest_ns - self._core.clock.monotonic_ns()) / 1e9))
        self.present_iteration = None
        try:
            return self._inbox.get(timeout=idle_s)
        finally:
            self._begin_iteration()

    def _apply(self, command: InboxItem, posted_ns: int) -> None:
        match command:
            case Submit(request_id, request):
                self._core.enqueue(request_id, request, posted_ns)
            case Cancel(request_id, keep_output_tokens, sequence_index):
                self._core.cancel(request_id, keep_output_tokens, sequence_index)
            case StopSession(request_id, session_id, end, namespace):
                self._core.stop_session(request_id, session_id, end, namespace)
            case NameAdapter(request_id, name, directory):
                self._core.names.change(request_id, name, directory)
            case Future():
                command.set_result(self._core.stats())
            case ClientGone(client_index):
                for request_id in self._core.live_ids():
                    if request_id >> CLIENT_SHIFT == client_index:
                        self._core.cancel(request_id)

    def _report(self, publish_stats: PublishStats) -> None:
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + self._stats_period_s
            publish_stats(self._core.stats())
