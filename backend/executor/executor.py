"""Executor: enqueues, awaits and cancels requests, and has the engine's statistics, with the semantics of TensorRT-LLM's.

An Executor talks to one engine through a Transport. For each live request it remembers where the responses go: into a
mailbox (`enqueue_request` and `await_responses`) or to a callback (`submit`). If the engine is lost, each live request is
answered with an UNAVAILABLE error. So each accepted request gets exactly one final response, whatever happens.

While an engine process gives no sign of life (watch.py) the Executor is not ready: it refuses new requests at once, and those
in flight wait.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.api.config import EngineConfig
from backend.api.errors import EngineUnavailable, ErrorCode, EverbatchError
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response
from backend.api.stats import DebugTensors, EngineStats, IterationRequests, IterationStats, KvEvent
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
    StopSession,
    Submit,
)
from backend.core.step import WorkerGroup
from backend.engine.core import EngineCore
from backend.executor.load import with_model_path, workers_of, workers_of_buffers
from backend.executor.losses import why_lost
from backend.executor.mailbox import Mailboxes
from backend.executor.record_shelf import RecordShelf
from backend.executor.transport import ENDED, InProcessTransport, Transport
from backend.executor.watch import Watch
from backend.wire.client import SocketTransport, wait_until

if TYPE_CHECKING:
    from backend.executor.engine_supervisor import EngineProcess

log = logging.getLogger("everbatch.executor")
OnResponse = Callable[[Response], None]


class Executor:
    def __init__(self, transport: Transport, process: EngineProcess | None = None) -> None:
        """Use one of the class methods below instead. `process` is the engine process that this Executor owns, if any."""
        self._transport = transport
        self._process = process
        self._pid = os.getpid()
        self._hello: Hello | None = None
        self._stats: EngineStats | None = None
        self.adapters: Mapping[str, str] = {}  # that requests may name, with their directories
        self._live: dict[RequestId, OnResponse] = {}
        self._mailboxes = Mailboxes()
        self._records = RecordShelf()
        self._lock = threading.Lock()
        self._counter = itertools.count(1)
        self._shut_down = False
        self._connected = False
        self._num_deaths = 0  # how often the engine process had died when the present connection was made
        self._watch: Watch | None = None
        if transport.is_remote:
            self._watch = Watch(process)
            self._watch.start()
        transport.start(self._on_message, self._on_lost)

    @classmethod
    def in_process(cls, config: EngineConfig, workers: WorkerGroup, model_path: str = "") -> Executor:
        """Run an engine in a thread of this process."""
        return cls(InProcessTransport(EngineCore(config, workers), model_path))

    @classmethod
    def from_directory(
        cls,
        model_path: str | Path,
        config: EngineConfig | None = None,
        logits_post_processors: Mapping[str, Callable[..., Any]] | None = None,
        batched_logits_post_processor: Callable[..., Any] | None = None,
    ) -> Executor:
        """Run an engine in this process with the checkpoint in a directory.

        `logits_post_processors`: by the names that requests give, see worker/post_processors.py. Raises ConfigError, which
        says `File does not exist` when there is no such directory.
        """
        config = with_model_path(config or EngineConfig(), str(model_path))
        workers = workers_of(config, logits_post_processors, batched_logits_post_processor)
        return cls.in_process(config, workers, str(workers.model_path))

    @classmethod
    def from_buffers(
        cls,
        tensors: Mapping[str, Any],
        json_config: str,
        config: EngineConfig | None = None,
        logits_post_processors: Mapping[str, Callable[..., Any]] | None = None,
        batched_logits_post_processor: Callable[..., Any] | None = None,
    ) -> Executor:
        """Like `from_directory`, with tensors in memory, by their names in a checkpoint, and the text of config.json."""
        config = config or EngineConfig()
        own = (logits_post_processors, batched_logits_post_processor)
        return cls.in_process(config, workers_of_buffers(tensors, json_config, config, *own))

    @classmethod
    def launch(cls, config: EngineConfig, socket_path: str, owns_directory: bool = False) -> Executor:
        """Start an engine process, supervise it, and block until it is ready. Raises ConfigError or EngineUnavailable.

        `owns_directory`: the socket's directory was made for this engine. The caller removes it; if the caller is killed, the
        engine process does.
        """
        from backend.executor.engine_supervisor import EngineProcess

        process = EngineProcess(config, socket_path, owns_directory)
        process.start(config.triton.attach_timeout_s)
        executor = cls(SocketTransport(socket_path), process)
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

    def is_ready(self) -> bool:
        """True if a request that is sent now would reach a working engine."""
        return not self._shut_down and self._connected and (self._watch is None or self._watch.is_fresh)

    def why_not_ready(self) -> str:
        """One clause for a person; empty while it is ready."""
        if self.is_ready():
            return ""
        if self._shut_down:
            return "the executor has been shut down"
        if self._connected and self._watch is not None:
            return self._watch.describe()
        return "the engine is not running, or is still starting"

    @property
    def has_given_up(self) -> bool:
        """True if this Executor owns an engine that died too often and is not started again."""
        return self._process is not None and self._process.has_given_up

    def enqueue_request(self, request: Request) -> RequestId:
        """Send a request whose responses `await_responses` fetches. Returns at once, and raises what `submit` raises."""
        return self._submit(request, self._mailboxes.put, mailbox=True)

    def enqueue_requests(self, requests: list[Request]) -> list[RequestId]:
        return [self.enqueue_request(request) for request in requests]

    def enqueue_refusal(self, error: EverbatchError, client_id: int | None = None) -> RequestId:
        """An id whose one response is this error: for facades that cannot even make a Request of what they were given."""
        request_id = self._register(self._mailboxes.put, mailbox=True)
        self._tell(Response(request_id, client_id, error_or_none=error.message, error_code=error.code))
        return request_id

    def submit(self, request: Request, on_response: OnResponse) -> RequestId:
        """Send a request whose responses go to a callback. Returns at once.

        One thread at a time calls the callbacks of all requests, in the order of the responses, so they must not block. Raises
        EngineUnavailable (also after `shutdown`), or InvalidRequest when the request is too large to be sent. Everything else
        that is wrong with the request is answered with an error response.
        """
        return self._submit(request, on_response)

    def await_responses(
        self, ids: RequestId | list[RequestId] | timedelta | None = None, timeout: timedelta | float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Fetch responses of enqueued requests: of all (None), of one id, or of several ids, which gives a list of lists.

        Blocks until there is a response, at most for `timeout` (seconds or timedelta; None waits for ever), after which the
        list is empty. Raises EngineUnavailable after `shutdown`.
        """
        self._check_open()
        if isinstance(ids, timedelta):
            ids, timeout = None, ids
        timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if ids is None:
            return self._mailboxes.take_any(timeout_s)
        if isinstance(ids, list):
            return self._mailboxes.take_each(ids, timeout_s)
        return self._mailboxes.take(ids, timeout_s)

    def get_num_responses_ready(self, request_id: RequestId | None = None) -> int:
        self._check_open()
        return self._mailboxes.num_ready(request_id)

    def cancel_request(
        self, request_id: RequestId, keep_output_tokens: int | None = None, sequence_index: int | None = None
    ) -> None:
        """Ask the engine to end a request, which then gets a final result. Unknown and finished ids are ignored.

        With `keep_output_tokens`, a session's log keeps only so many output tokens of this turn. With `sequence_index`, only
        that sequence of the request ends.
        """
        with self._lock:
            known = request_id in self._live
        if known:
            self._try_send(Cancel(request_id, keep_output_tokens, sequence_index))

    def stop_session(self, session_id: SessionId, end: bool, on_response: OnResponse, namespace: str = "") -> RequestId:
        """Interrupt the running turn of a session, and with `end` erase the session. The answer is one final response."""
        request_id = self._register(on_response)
        self._send_or_forget(StopSession(request_id, session_id, end, namespace))
        return request_id

    def name_adapter(self, name: str, directory: str | None, on_response: OnResponse) -> RequestId:
        """Let requests name the LoRA adapter in a directory below `lora.allowed_dir`; without one, let them not any more.

        The answer is one final response: an error, or an empty result once the adapter has been read.
        """
        request_id = self._register(on_response)
        self._send_or_forget(NameAdapter(request_id, name, directory))
        return request_id

    def can_enqueue_requests(self) -> bool:
        return self.is_ready()

    def latest_stats(self) -> EngineStats | None:
        """Statistics of the engine: current ones if it runs in this process, else the last that the engine process has sent
        (once a second), None before the first.
        """
        return self._transport.ask_stats() or self._stats

    def take_iteration_stats(self) -> list[IterationStats]:
        """Statistics of the steps since the last call, oldest first; at most `records.max_iterations` (0 = none are kept)."""
        self._check_open()
        return self._records.take_iterations()

    def take_request_stats(self) -> list[IterationRequests]:
        """The requests in each step since the last call; at most `records.max_request_iterations` steps (0 = none)."""
        self._check_open()
        return self._records.take_requests()

    def take_debug_tensors(self) -> list[DebugTensors]:
        """The `records.debug_tensors` of the steps since the last call; at most `records.max_debug_iterations` (0 = none)."""
        self._check_open()
        return self._records.take_debug_tensors()

    def take_kv_events(self, timeout: timedelta | float | None = 0.0) -> list[KvEvent]:
        """Which blocks can be found in the cache, or no longer, since the last call; at most `records.max_kv_events` (0 = none).

        Waits for the first one, at most for `timeout` (seconds or timedelta; None waits until `shutdown`).
        """
        self._check_open()
        return self._records.take_kv_events(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

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

    def _submit(self, request: Request, on_response: OnResponse, mailbox: bool = False) -> RequestId:
        request_id = self._register(on_response, mailbox)
        self._send_or_forget(Submit(request_id, request))
        return request_id

    def _register(self, on_response: OnResponse, mailbox: bool = False) -> RequestId:
        self._check_open()
        self._check_works()
        with self._lock:
            if not (self._connected or self._transport.is_remote):
                raise EngineUnavailable(ENDED)
            if self._hello is None or not self._connected:
                raise EngineUnavailable("the engine is not ready yet; try again in a few seconds")
            request_id = RequestId(self._hello.client_index << CLIENT_SHIFT | next(self._counter))
            if mailbox:
                self._mailboxes.open(request_id)  # The box must be there before its first response.
            self._live[request_id] = on_response
        return request_id

    def _send_or_forget(self, command: Command) -> None:
        try:
            self._transport.send(command)
        except EverbatchError:
            with self._lock:
                answered = self._live.pop(command.request_id, None) is None
            if not answered:
                self._mailboxes.forget(command.request_id)
                raise

    def _try_send(self, command: Command) -> None:
        with contextlib.suppress(EngineUnavailable):  # the engine is gone, and with it the request
            self._transport.send(command)

    def _check_works(self) -> None:
        if self._process is not None and self._process.has_given_up:
            raise EngineUnavailable(self._process.why_given_up)
        if self._watch is not None and self._connected and not self._watch.is_fresh:
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
            if self._watch is not None:
                self._watch.pid = self._transport.engine_pid
            self._beat(0.0)
            self._num_deaths = 0 if self._process is None else self._process.num_deaths
            with self._lock:
                self._hello, self._connected = message, True
            self.adapters = message.adapters
            self._records.limit(message.config.records)
        elif isinstance(message, Heartbeat):
            self._beat(message.turn_age_s)
        elif isinstance(message, Recorded):
            self._records.put(message.records)
        elif isinstance(message, Adapters):
            self.adapters = message.adapters
        else:
            self._stats = message.stats

    def _beat(self, turn_age_s: float) -> None:
        if self._watch is not None:
            self._watch.beat(turn_age_s)
            self._watch.is_connected = True

    def _tell(self, response: Response) -> None:
        with self._lock:
            is_final = response.is_final
            on_response = self._live.pop(response.request_id, None) if is_final else self._live.get(response.request_id)
        if on_response is None:
            return
        try:
            on_response(response)
        except Exception:
            # The callback is the caller's code, and a fault in it must not end the thread that serves all other requests.
            log.exception("the callback of request %d failed", response.request_id)

    def _on_lost(self) -> None:
        """Answer all live requests with an error, because the engine is gone and will not answer them."""
        with self._lock:
            self._connected = False
            lost = list(self._live)
        if self._watch is not None:
            self._watch.is_connected = False
        message = self._why_lost() if lost else ""
        for request_id in lost:
            self._tell(Response(request_id, error_or_none=message, error_code=ErrorCode.UNAVAILABLE))

    def _why_lost(self) -> str:
        """The error for requests that were lost with the engine."""
        if not self._transport.is_remote:
            return ENDED
        return why_lost(self._process, self._num_deaths, lambda: self._shut_down)
