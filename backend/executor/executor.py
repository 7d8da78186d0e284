"""Executor: enqueue, await, cancel, statistics; in TensorRT-LLM's sense and with its semantics.

An Executor talks to one engine through a Transport. It keeps, for each live request, who is to be told: a mailbox
(`enqueue_request` + `await_responses`) or a callback (`submit`). If the engine is lost, each live request is answered with
an UNAVAILABLE error, so that there is exactly one final response per accepted request, whatever happens.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from backend.api.config import EngineConfig
from backend.api.errors import EngineUnavailable, ErrorCode
from backend.api.request import Request, RequestId, SessionId
from backend.api.response import Response
from backend.api.stats import EngineStats
from backend.core.step import WorkerGroup
from backend.engine.core import EngineCore
from backend.engine.ipc import CLIENT_SHIFT, Cancel, Command, Hello, Message, Responses, StopSession, Submit
from backend.executor.mailbox import Mailboxes
from backend.executor.transport import InProcessTransport, SocketTransport, Transport, wait_until

if TYPE_CHECKING:
    from backend.executor.supervisor import EngineProcess

log = logging.getLogger("everbatch.executor")
OnResponse = Callable[[Response], None]
LOST = "the engine process ended while the request ran; send it again in a few seconds"


class Executor:
    def __init__(self, transport: Transport, process: EngineProcess | None = None):
        """Use one of the class methods below. `process`: the engine process that this Executor owns, if any."""
        self._transport = transport
        self._process = process
        self._hello: Hello | None = None
        self._stats: EngineStats | None = None
        self._live: dict[RequestId, OnResponse] = {}
        self._mailboxes = Mailboxes()
        self._lock = threading.Lock()
        self._counter = itertools.count(1)
        self._shut_down = False
        self._connected = False
        transport.start(self._on_message, self._on_lost)

    @classmethod
    def in_process(cls, config: EngineConfig, workers: WorkerGroup, model_path: str = "") -> Executor:
        """An engine in a thread of this process."""
        return cls(InProcessTransport(EngineCore(config, workers), model_path))

    @classmethod
    def from_directory(cls, model_path: str | Path, config: EngineConfig | None = None) -> Executor:
        """An engine in this process over a checkpoint directory. Raises ConfigError: `File does not exist` when there is none."""
        from backend.worker.group import InProcessWorkerGroup

        config = config or EngineConfig()
        model = msgspec.structs.replace(config.model, path=str(model_path))
        config = msgspec.structs.replace(config, model=model)
        return cls.in_process(config, InProcessWorkerGroup(model, config.scheduler, config.kv_cache), str(model_path))

    @classmethod
    def from_buffers(cls, tensors: Mapping[str, Any], json_config: str, config: EngineConfig | None = None) -> Executor:
        """As `from_directory`, over tensors in memory by their checkpoint names and the text of config.json."""
        from backend.worker.group import InProcessWorkerGroup

        config = config or EngineConfig()
        workers = InProcessWorkerGroup.from_buffers(
            tensors, json_config, config.model, config.scheduler, config.kv_cache
        )
        return cls.in_process(config, workers)

    @classmethod
    def launch(cls, config: EngineConfig, socket_path: str) -> Executor:
        """Start an engine process and supervise it. Blocks until it is ready; raises what kept it from starting."""
        from backend.executor.supervisor import EngineProcess

        process = EngineProcess(config, socket_path)
        process.start(config.triton.attach_timeout_s)
        executor = cls(SocketTransport(socket_path), process)
        if not wait_until(executor.is_ready, timeout_s=10):
            executor.shutdown()
            raise EngineUnavailable("the engine process is ready but does not answer on its socket")
        return executor

    @classmethod
    def attach(cls, socket_path: str, wait_s: float = 0.0) -> Executor:
        """Become a client of an engine that somebody else launches. Waits up to `wait_s` seconds for it, then goes on trying."""
        executor = cls(SocketTransport(socket_path))
        if wait_s:
            wait_until(executor.is_ready, wait_s)
        return executor

    @property
    def hello(self) -> Hello | None:
        """What the engine said of itself; None until it was reached first."""
        return self._hello

    def is_ready(self) -> bool:
        """Whether a request sent now would reach an engine."""
        return self._hello is not None and not self._shut_down and self._connected

    def enqueue_request(self, request: Request) -> RequestId:
        """Queue a request for `await_responses`. Returns at once. Raises EngineUnavailable, also after `shutdown`."""
        return self._submit(request, self._mailboxes.put, mailbox=True)

    def enqueue_requests(self, requests: list[Request]) -> list[RequestId]:
        return [self.enqueue_request(request) for request in requests]

    def submit(self, request: Request, on_response: OnResponse) -> RequestId:
        """Queue a request whose responses go to a callback: in order, from one thread; it must not block.

        Raises EngineUnavailable; everything else that is wrong with the request is answered as an error response.
        """
        return self._submit(request, on_response)

    def await_responses(
        self, ids: RequestId | list[RequestId] | timedelta | None = None, timeout: timedelta | float | None = None
    ) -> list[Response] | list[list[Response]]:
        """Fetch responses of requests that were enqueued: of any (None), of one id, or of several (a list of lists).

        Blocks until there is one, at most `timeout` (seconds or timedelta; None = for ever); then the list is empty.
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

    def cancel_request(self, request_id: RequestId, keep_output_tokens: int | None = None) -> None:
        """Ask for the end of a request; it answers with a final result. Unknown and finished ids are ignored."""
        with self._lock:
            known = request_id in self._live
        if known:
            self._try_send(Cancel(request_id, keep_output_tokens))

    def stop_session(self, session_id: SessionId, end: bool, on_response: OnResponse) -> RequestId:
        """Interrupt the running turn of a session, and erase it if `end`; the answer is one final response."""
        request_id = self._register(on_response)
        self._send_or_forget(StopSession(request_id, session_id, end))
        return request_id

    def can_enqueue_requests(self) -> bool:
        return self.is_ready()

    def latest_stats(self) -> EngineStats | None:
        """The engine's newest statistics, at most a period old."""
        return self._stats

    def shutdown(self, drain: bool = False) -> None:
        """End. Live requests are answered with an error, or first finished (`drain`, in process only). Wakes all waiters."""
        if self._shut_down:
            return
        self._shut_down = True
        self._transport.close(drain)
        if self._process is not None:
            self._process.stop()
        self._on_lost()
        self._mailboxes.close()

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
        with self._lock:
            if self._hello is None or not self._connected:
                raise EngineUnavailable("the engine is not ready yet; try again in a few seconds")
            request_id = RequestId(self._hello.client_index << CLIENT_SHIFT | next(self._counter))
            self._live[request_id] = on_response
        if mailbox:
            self._mailboxes.open(request_id)
        return request_id

    def _send_or_forget(self, command: Command) -> None:
        try:
            self._transport.send(command)
        except EngineUnavailable:
            with self._lock:
                answered = self._live.pop(command.request_id, None) is None
            if not answered:
                self._mailboxes.forget(command.request_id)
                raise

    def _try_send(self, command: Command) -> None:
        try:
            self._transport.send(command)
        except EngineUnavailable:
            log.info("a command was dropped: the engine is gone, and with it the request")

    def _check_open(self) -> None:
        if self._shut_down:
            raise EngineUnavailable("the executor has been shut down; make a new one")

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Responses):
            for response in message.responses:
                self._tell(response)
        elif isinstance(message, Hello):
            with self._lock:
                self._hello, self._connected = message, True
        else:
            self._stats = message.stats

    def _tell(self, response: Response) -> None:
        with self._lock:
            is_final = response.is_final
            on_response = self._live.pop(response.request_id, None) if is_final else self._live.get(response.request_id)
        if on_response is not None:
            on_response(response)

    def _on_lost(self) -> None:
        """The engine is gone: nothing that was sent to it will be answered by it."""
        with self._lock:
            self._connected = False
            lost = list(self._live)
        for request_id in lost:
            self._tell(Response(request_id, error_or_none=LOST, error_code=ErrorCode.UNAVAILABLE))
