"""Executor: enqueues, awaits and cancels requests, and has the engine's statistics, with the semantics of TensorRT-LLM's.

An Executor talks to one engine through a Transport. For each live request it remembers where the responses go: into a
mailbox (`enqueue_request` and `await_responses`) or to a callback (`submit`). If the engine process is lost, live requests are
held until the next one goes on with them (replay.py); where none comes they are answered with an UNAVAILABLE error. So each
accepted request gets exactly one final response, whatever happens.

While an engine process gives no sign of life (watch.py) the Executor is not ready: it refuses new requests at once, and those
in flight wait.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from backend.api.config.schema import EngineConfig
from backend.api.errors import EngineUnavailable, EverbatchError
from backend.api.request import Request, RequestId
from backend.api.response import Response
from backend.api.stats import EngineStats, PauseCounts
from backend.core.messages import (
    CLIENT_SHIFT,
    Adapters,
    Cancel,
    Command,
    Heartbeat,
    Hello,
    Message,
    NameAdapter,
    Recorded,
    Responses,
    Resume,
    Submit,
    Trial,
)
from backend.executor.in_this_process import InThisProcess
from backend.executor.live import Commands, OnResponse
from backend.executor.mailbox import Mailboxes, ResponseReader
from backend.executor.pause import NOT_BACK, Pauses
from backend.executor.replay import COUNTER, Replay
from backend.executor.statistics_history import RecordReader, StatisticsHistory
from backend.executor.transport import ENDED, Transport
from backend.executor.watch import OwnedEngine, Watch
from backend.wire.client import SocketTransport, wait_until

log = logging.getLogger("everbatch.executor")
LEAVE_MARGIN_S = 2.0  # by so much a client of an engine is more patient than its owner, who ends it


class Executor(InThisProcess, Commands, ResponseReader, RecordReader):
    def __init__(self, transport: Transport, process: OwnedEngine | None = None) -> None:
        """Use one of the class methods below instead. `process` is the engine process that this Executor owns, if any."""
        self._transport = transport
        self._process = process
        self._pid = os.getpid()
        self._name = secrets.token_hex(8)
        self._hello: Hello | None = None
        self._stats: EngineStats | None = None
        self.adapters: Mapping[str, str] = {}  # that requests may name, with their directories
        self._replay, self._mailboxes, self._records = Replay(), Mailboxes(), StatisticsHistory()
        self._lock = threading.Lock()
        self._sending = threading.RLock()  # held to give a command an id and send it; taken ahead of `_lock`
        self._counter = itertools.count(1)
        self._shut_down = False
        self.is_connected = False  # True while the engine can be reached, even if it gives no sign of life
        self.socket_path = ""  # path of the socket, if this Executor has launched the engine process
        self._pauses = Pauses(self._replay, self._lock, transport, process, self._tell)
        self._watch: Watch | None = None
        self._num_left = 0  # how often a silent engine has been left since its last sign of life
        if transport.is_remote:
            self._watch = Watch(process, self._tick)
            self._watch.start()
        transport.start(self._on_message, self._on_lost)

    @classmethod
    def launch(
        cls, config: EngineConfig, socket_path: str, owns_directory: bool = False, name: str = "the engine process"
    ) -> Executor:
        """Start an engine process, supervise it, and block until it is ready. Raises ConfigError or EngineUnavailable.

        `owns_directory`: the socket's directory was made for this engine. The caller removes it; if the caller is killed, the
        engine process does. `name`: how the log calls the process.
        """
        from backend.executor.engine_supervisor import EngineProcess

        process = EngineProcess(config, socket_path, owns_directory, name)
        process.start(config.triton.attach_timeout_s)
        executor = cls(SocketTransport(socket_path), process)
        executor.socket_path = socket_path
        if not wait_until(executor.is_ready, timeout_s=10):
            executor.shutdown()
            raise EngineUnavailable("the engine process is ready but does not answer on its socket")
        return executor

    @classmethod
    def attach(cls, socket_path: str, wait_s: float = 0.0) -> Executor:
        """Become a client of an engine that another process launches.

        Waits up to `wait_s` seconds for it. After that it still tries to reach the engine, in the background.
        """
        executor = cls(SocketTransport(socket_path))
        wait_until(executor.is_ready, wait_s)
        return executor

    @property
    def hello(self) -> Hello | None:
        """The engine's description of itself; None until the engine has been reached once."""
        return self._hello

    @property
    def engine_pid(self) -> int | None:
        """The id of the engine process, or of the last one while there is none; None for an engine in this process."""
        return self._transport.engine_pid

    def is_ready(self) -> bool:
        """True if a request that is sent now would reach a working engine."""
        return not self._shut_down and self.is_connected and (self._watch is None or self._watch.is_fresh)

    def why_not_ready(self) -> str:
        """One clause for a person; empty while it is ready."""
        if self.is_ready():
            return ""
        if self._shut_down:
            return "the executor has been shut down"
        if self.is_connected and self._watch is not None:
            return self._watch.describe()
        return "the engine is not running, or is still starting"

    @property
    def silent_s(self) -> float:
        """The seconds since the engine's last sign of life; 0 where the engine runs in this process."""
        return 0.0 if self._watch is None else self._watch.silent_s

    def leave_engine(self) -> None:
        """Hang up on an engine that is silent, and connect again. What is in flight is held meanwhile, and can be moved."""
        self._transport.reconnect()

    @property
    def has_given_up(self) -> bool:
        """True if this Executor owns an engine that died too often and is not started again."""
        return self._process is not None and self._process.has_given_up

    def enqueue_request(self, request: Request) -> RequestId:
        """Send a request whose responses `await_responses` fetches. Returns at once, and raises what `submit` raises."""
        return self._submit(request, self._mailboxes.put, None, mailbox=True)

    def enqueue_requests(self, requests: list[Request]) -> list[RequestId]:
        return [self.enqueue_request(request) for request in requests]

    def enqueue_refusal(self, error: EverbatchError, client_id: int | None = None) -> RequestId:
        """An id whose one response is this error: for facades that cannot even make a Request of what they were given."""
        request_id = self._register(Cancel, self._mailboxes.put, mailbox=True).request_id
        self._tell(Response(request_id, client_id, error_or_none=error.message, error_code=error.code))
        return request_id

    def submit(self, request: Request, on_response: OnResponse, resume: Resume | None = None) -> RequestId:
        """Send a request whose responses go to a callback. Returns at once. `resume`: what another process has had begun.

        One thread at a time calls the callbacks of all requests, in the order of the responses, so they must not block. Raises
        EngineUnavailable (also after `shutdown`), or InvalidRequest when the request is too large to be sent. Everything else
        that is wrong with the request is answered with an error response.
        """
        return self._submit(request, on_response, resume, mailbox=False)

    def take_over(self, other: Executor, request_id: RequestId, on_response: OnResponse) -> RequestId | None:
        """Go on with a request that another Executor holds for its next engine; None if it does not. Raises EngineUnavailable."""
        with self._sending:
            own_id = self._next_id()
            with other._lock:
                live = other._replay.release(request_id)
            if live is None:
                return None
            with self._lock:
                commands = self._replay.adopt(live, own_id, on_response, time.monotonic())
            for command in commands:
                self._try_send(command)
        return own_id

    def cancel_request(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None:
        """Ask the engine to end a request, which then gets a final result. Unknown and finished ids are ignored.

        With `keep_output_tokens`, a session's log keeps only so many output tokens of this turn. With `sequence_index`, only
        that sequence of the request ends.
        """
        with self._lock:
            command = self._replay.cancel(Cancel(request_id, keep_output_tokens, sequence_index))
        if command is not None:
            self._try_send(command)

    @property
    def pauses(self) -> PauseCounts:
        """How often, and for how long, live requests have waited for another engine."""
        return self._replay.counts

    def can_enqueue_requests(self) -> bool:
        """True if a request that is sent now is accepted: by the engine, or to wait for it while it is started again."""
        return self.is_ready() or (not self._shut_down and not self.is_connected and self._pauses.takes_new())

    def latest_stats(self) -> EngineStats | None:
        """Statistics of the engine: current ones if it runs in this process, else the last that the engine process has sent
        (once a second), None before the first.
        """
        return self._transport.ask_stats() or self._stats

    def shutdown(self, drain: bool = False) -> None:
        """End the Executor, with the engine if it is its own, and wake all waiters.

        Live requests are answered with an error. An engine in this process can finish them first (`drain`). In a process that was
        forked from the Executor's own it does nothing: the engine and the connection are not the child's.
        """
        if self._shut_down or os.getpid() != self._pid:
            return
        self._shut_down = True
        if self._watch is not None:
            self._watch.stop()
        self._transport.close(drain)
        if self._process is not None:
            self._process.stop()
        self._on_lost()
        self._mailboxes.close()
        self._records.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _submit(self, request: Request, on_response: OnResponse, resume: Resume | None, mailbox: bool) -> RequestId:
        def command(request_id: RequestId) -> Submit:
            known = resume or Resume()
            is_named = bool(known.turn) and not known.turn.endswith("/")
            if request.session is None or is_named:
                return Submit(request_id, request, resume)
            turn = (
                known.turn + f"{self._name}-{request_id & COUNTER}"
            )  # behind the client's part of the name, if there is one
            return Submit(request_id, request, replace(known, turn=turn))

        return self._send(command, on_response, mailbox, request)

    def _send(
        self,
        command: Callable[[RequestId], Command],
        on_response: OnResponse,
        mailbox: bool = False,
        request: Request | None = None,
    ) -> RequestId:
        """`request`: what the command submits; it may wait for an engine that is started again."""
        with self._sending:
            waiting = None if self.is_connected or not self._pauses.takes_new() else request
            registered = self._register(command, on_response, mailbox, waiting)
            if waiting is not None:
                return registered.request_id
            try:
                self._transport.send(registered)
            except EverbatchError:
                with self._lock:
                    live = self._replay.pop(registered.request_id)
                if live is not None:
                    self._mailboxes.forget(registered.request_id)
                    raise
        return registered.request_id

    def _register(
        self,
        command: Callable[[RequestId], Command],
        on_response: OnResponse,
        mailbox: bool = False,
        waiting: Request | None = None,
    ) -> Command:
        """Make a command of the next id, and keep where its responses go. It can be sent from then on, unless it is `waiting`."""
        with self._lock:
            if waiting is not None:
                self._pauses.check_new(waiting)
            request_id = self._next_id(waiting is not None)
            if mailbox:
                self._mailboxes.open(request_id)  # The box must be there before its first response.
            made = command(request_id)
            self._replay.add(request_id, on_response, made, time.monotonic(), waiting is not None)
        return made

    def _next_id(self, is_held: bool = False) -> RequestId:
        """Raises EngineUnavailable while no engine takes commands, for one that is not held until then."""
        self._check_open()
        self._check_works()
        if not (self.is_connected or self._transport.is_remote):
            raise EngineUnavailable(ENDED)
        if self._hello is None or not (self.is_connected or is_held):
            raise EngineUnavailable(NOT_BACK)
        return RequestId(self._hello.client_index << CLIENT_SHIFT | next(self._counter))

    def _try_send(self, command: Command) -> None:
        with contextlib.suppress(EngineUnavailable):  # it is lost with the engine, and the next one gets it
            self._transport.send(command)

    def _check_works(self) -> None:
        if self._process is not None and self._process.has_given_up:
            raise EngineUnavailable(self._process.why_given_up)
        if self._watch is not None and self.is_connected and not self._watch.is_fresh:
            raise EngineUnavailable(
                f"{self._watch.describe()}; try again in a few seconds, it is started again if it does not come back"
            )

    def _check_open(self) -> None:
        if self._shut_down:
            raise EngineUnavailable("the executor has been shut down; make a new one")
        if os.getpid() != self._pid:
            raise EngineUnavailable(
                f"this executor belongs to process {self._pid}, from which process {os.getpid()} was forked; make a new one"
            )

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Responses):
            for response in message.responses:
                self._tell(response)
        elif isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Heartbeat):
            self._beat(message.turn_age_s)
        elif isinstance(message, Recorded):
            self._records.put(message.records)
        elif isinstance(message, Adapters):
            self.adapters = message.adapters
        elif isinstance(message, Trial):
            self._replay.note_trial(message.request_id)
        else:
            self._stats = message.stats

    def _greet(self, hello: Hello) -> None:
        """An engine is there. It gets the held commands first, and new ones after that."""
        if self._watch is not None:
            self._watch.pid = self._transport.engine_pid
        self._beat(0.0)
        known, self._hello = self._hello, hello
        self._records.limit(hello.config.records)
        owns = known is not None and self._process is not None
        names = (
            self.adapters if owns else hello.adapters
        )  # the owner teaches the engine what has changed since its start
        changes = [*(names.items() - hello.adapters.items()), *((each, None) for each in hello.adapters.keys() - names)]
        index = hello.client_index << CLIENT_SHIFT
        with self._sending:
            self._pauses.end(hello, [NameAdapter(RequestId(index | next(self._counter)), *each) for each in changes])
            self.adapters, self.is_connected = names, True

    def _beat(self, turn_age_s: float) -> None:
        if self._watch is not None:
            self._watch.beat(turn_age_s)
            self._watch.is_connected = True

    def _tell(self, response: Response) -> None:
        with self._lock:
            told = self._replay.take(response, time.monotonic_ns())
        if told is None:
            return
        on_response, response = told
        try:
            on_response(response)
        except Exception:
            # The callback is the caller's code, and a fault in it must not end the thread that serves all other requests.
            log.exception("the callback of request %d failed", response.request_id)

    def _on_lost(self) -> None:
        """The engine is gone. Live requests are held for the next one, or answered with an error."""
        with self._lock:
            self.is_connected = False
        if self._watch is not None:
            self._watch.is_connected = False
        self._pauses.begin(lambda: self._shut_down)

    def _tick(self) -> None:
        if not self.is_connected:
            self._pauses.look()
        if self._process is None:
            self._leave_silent_engine()

    def _leave_silent_engine(self) -> None:
        """Connect again where the engine has been silent for longer than its owner bears, and again after as long a time: the
        owner may have died while the process was stopped, and another engine listens at the address now.
        """
        if self._watch is None or self._hello is None:
            return
        patience_s = self._hello.config.triton.watchdog_timeout_s + LEAVE_MARGIN_S
        num_times = int(self._watch.silent_s / patience_s)
        if num_times > self._num_left:
            self._transport.reconnect()
        self._num_left = num_times
