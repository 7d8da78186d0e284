"""EngineLoop: drives an EngineCore from a thread-safe inbox. One thread runs it; any thread may post.

Each turn: take every command that has arrived, run one step if there is work, deliver the responses of both. Without work it
sleeps until a command arrives or a deadline is due.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from backend.api.errors import EngineUnavailable
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.messages import CLIENT_SHIFT, Cancel, ClientGone, Command, StopSession, Submit
from backend.engine.core import EngineCore

MAX_IDLE_S = 1.0
Deliver = Callable[[list[Response]], None]
PublishStats = Callable[[EngineStats], None]
PublishRecords = Callable[[Records], None]


class EngineLoop:
    def __init__(self, core: EngineCore, stats_period_s: float = 1.0) -> None:
        self._core = core
        self._stats_period_s = stats_period_s
        self._next_stats = 0.0
        self._inbox: queue.SimpleQueue[Command | ClientGone | None] = queue.SimpleQueue()
        core.antechamber.on_ready(lambda: self._inbox.put(None))
        self._stopping = False
        self._drain = False
        self._num_turns = 0
        self.present_turn: int | None = (
            None  # the number of the turn that runs, None while the loop sleeps; for any thread
        )

    def post(self, command: Command | ClientGone) -> None:
        """Hand a command over; it is applied before the next step."""
        self._inbox.put(command)

    def stop(self, drain: bool = False) -> None:
        """End `run` soon. `drain`: only when no request is live any more; otherwise live ones end with an error."""
        self._drain = drain
        self._stopping = True
        self._inbox.put(None)

    def run(
        self,
        deliver: Deliver,
        publish_stats: PublishStats = lambda stats: None,
        publish_records: PublishRecords = lambda records: None,
    ) -> None:
        """Serve until `stop`. Whatever ends it, every live request has been answered then.

        The callbacks are called from this thread and must not block. Records go ahead of the responses of the same steps.
        """
        farewell = "the engine has failed; its log says why"
        try:
            while True:
                self._begin_turn()
                self._poll()
                if self._is_over:
                    farewell = "the engine is shutting down; send the request again later"
                    break
                responses = self._core.step() if self._core.has_work else self._core.take_responses()
                records = self._core.take_records()
                if records is not None:
                    publish_records(records)
                if responses:
                    deliver(responses)
                self._report(publish_stats)
        finally:
            self._core.fail_all(EngineUnavailable(farewell))
            deliver(self._core.take_responses())
            self.present_turn = None

    @property
    def _is_over(self) -> bool:
        """Whether to end: at once, or when the requests that are live have ended."""
        return self._stopping and not (self._drain and (self._core.has_work or self._core.antechamber))

    def _begin_turn(self) -> None:
        self._num_turns += 1
        self.present_turn = self._num_turns

    def _poll(self) -> None:
        self._core.begin_poll()
        if not (self._core.has_work or self._is_over):
            try:
                self._apply(self._sleep())
            except queue.Empty:
                self._core.expire()
        while not self._inbox.empty():
            self._apply(self._inbox.get())
        if not self._core.has_work:
            self._core.admit()

    def _sleep(self) -> Command | ClientGone | None:
        """Wait for a command. Raises queue.Empty when none comes for MAX_IDLE_S, or before a request's deadline."""
        earliest_ns, idle_s = self._core.antechamber.earliest_deadline_ns, MAX_IDLE_S
        if earliest_ns is not None:
            idle_s = min(idle_s, max(0.0, (earliest_ns - self._core.clock.monotonic_ns()) / 1e9))
        self.present_turn = None
        try:
            return self._inbox.get(timeout=idle_s)
        finally:
            self._begin_turn()

    def _apply(self, command: Command | ClientGone | None) -> None:
        match command:
            case Submit(request_id, request):
                self._core.enqueue(request_id, request)
            case Cancel(request_id, keep_output_tokens, sequence_index):
                self._core.cancel(request_id, keep_output_tokens, sequence_index)
            case StopSession(request_id, session_id, end, namespace):
                self._core.stop_session(request_id, session_id, end, namespace)
            case ClientGone(client_index):
                for request_id in self._core.live_ids():
                    if request_id >> CLIENT_SHIFT == client_index:
                        self._core.cancel(request_id)

    def _report(self, publish_stats: PublishStats) -> None:
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + self._stats_period_s
            publish_stats(self._core.stats())
