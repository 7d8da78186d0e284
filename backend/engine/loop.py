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
from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats, Records
from backend.core.messages import (
    CLIENT_SHIFT,
    Cancel,
    ClientGone,
    Command,
    Look,
    NameAdapter,
    Resume,
    StopSession,
    Submit,
)
from backend.core.sequence import SessionKey, Status
from backend.engine.core import EngineCore
from backend.engine.live import LiveViews
from backend.engine.trials import Trials

MAX_IDLE_S = 1.0
LOADING_IDLE_S = 0.02  # while KV comes from the second level, whose silence has to be noticed
Deliver = Callable[[list[Response]], None]
PublishStats = Callable[[EngineStats], None]
PublishRecords = Callable[[Records], None]
InboxItem = Command | ClientGone | Future[EngineStats] | None
PublishAdapters = Callable[[Mapping[str, str]], None]
PublishTrial = Callable[[RequestId | None], None]


class EngineLoop:
    def __init__(self, core: EngineCore, stats_period_s: float = 1.0, clients_hold: bool = False) -> None:
        """`clients_hold`: should the engine fail, clients are not answered, for the next engine goes on with their requests."""
        self._core = core
        self._clients_hold = clients_hold
        self.trials = Trials(core)
        self._live_views = LiveViews(core)
        self._publish_trial: PublishTrial = lambda request_id: None
        self._stats_period_s = stats_period_s
        self._next_stats = 0.0
        self._inbox: queue.SimpleQueue[tuple[InboxItem, int]] = queue.SimpleQueue()
        core.preparation.on_ready(self._wake)
        core.level.on_ready(self._wake)
        core.names.on_outcome(self._wake)
        self._put_off: list[Cancel] = []
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
        publish_trial: PublishTrial = lambda request_id: None,
    ) -> None:
        """Serve until `stop`. Every live request has been answered when it returns, and when it raises unless clients hold them.

        The callbacks run on this thread and must not block. Records are published before the responses of the same steps, names
        of adapters before the response to the command that changed them, a trial before its first step.
        """
        self._publish_trial = publish_trial
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
                self._core.sessions.flush()
                if responses:
                    deliver(responses)
                self._report(publish_stats)
        finally:
            if self._is_over or not self._clients_hold:
                self._core.names.close(EngineUnavailable(farewell))
                self._core.fail_all(EngineUnavailable(farewell))
                self._core.sessions.close()
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
        self._advance_trials()
        if self._put_off:
            self._cancel_late()
        if not self._is_over and (not self._core.has_work or self._core.scheduler.waits_for_loads):
            try:
                self._apply(*self._sleep())
            except queue.Empty:
                self._core.expire()
            self._core.workers.check()
        while not self._inbox.empty():
            self._apply(*self._inbox.get())
        self._core.names.answer()
        self._advance_trials()
        if not self._core.has_work:
            self._core.admit()

    def _advance_trials(self) -> None:
        """End and begin trials. Clients hear of one before its first step."""
        if self.trials.advance():
            self._publish_trial(self.trials.request_id)
            self._core.admit()

    def _wake(self) -> None:
        self._inbox.put((None, 0))

    def _sleep(self) -> tuple[InboxItem, int]:
        """Wait for a command. Raises queue.Empty after MAX_IDLE_S, or when a request's deadline is due."""
        earliest_ns, idle_s = self._core.preparation.earliest_deadline_ns, MAX_IDLE_S
        if self._core.scheduler.waits_for_loads:
            idle_s = LOADING_IDLE_S
        if earliest_ns is not None:
            idle_s = min(idle_s, max(0.0, (earliest_ns - self._core.clock.monotonic_ns()) / 1e9))
        self.present_iteration = None
        try:
            return self._inbox.get(timeout=idle_s)
        finally:
            self._begin_iteration()

    def _apply(self, command: InboxItem, posted_ns: int) -> None:
        match command:
            case Submit(request_id, request, resume):
                self._supersede(request, resume)
                self._core.enqueue(request_id, request, posted_ns, resume)
            case Cancel():
                self._cancel(command)
            case StopSession(request_id, session_id, end, namespace):
                self._core.stop_session(request_id, session_id, end, namespace)
            case NameAdapter(request_id, name, directory):
                self._core.names.change(request_id, name, directory)
            case Look(request_id):
                self._core.outbox.put(self._live_views.answer(request_id))
            case Future():
                command.set_result(self._core.stats())
            case ClientGone(client_index):
                for request_id in self._core.live_ids():
                    if request_id >> CLIENT_SHIFT == client_index:
                        self._core.cancel(request_id)

    def _cancel(self, command: Cancel) -> None:
        """End a request; one that goes on here later than it was accepted elsewhere only after that, for it keeps its output."""
        if self._core.preparation.goes_on(command.request_id):
            self._put_off.append(command)
        else:
            self._core.cancel(command.request_id, command.keep_output_tokens, command.sequence_index)

    def _cancel_late(self) -> None:
        late, self._put_off = self._put_off, []
        for command in late:
            self._cancel(command)

    def _supersede(self, request: Request, resume: Resume | None) -> None:
        """End an earlier life of a session's turn that still runs: its client has lost its connection, not its engine."""
        if resume is None or request.session is None:
            return
        seq = self._core.sessions.get(SessionKey(request.cache_salt, request.session.id))
        if seq is not None and resume.is_life_of(seq.turn) and seq.status is not Status.IDLE:
            self._core.cancel(seq.request_id)

    def _report(self, publish_stats: PublishStats) -> None:
        now = time.monotonic()
        if now >= self._next_stats:
            self._next_stats = now + self._stats_period_s
            publish_stats(self._core.stats())
