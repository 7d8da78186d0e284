"""AdapterDesk: where requests wait whose LoRA adapter is still being read.

Reading, checking and packing an adapter takes up to a second, and is the work of threads of its own (lora.put_workers).
Meanwhile the request waits here, and with it every later one of the same task id, so that they reach the engine in their
order. An adapter for which those in use leave no room waits here too, until there is some.

    submit -> (read by a thread -> on_ready, which wakes the loop) -> admit -> EngineCore.enqueue

All but `_prepare` runs on the engine's thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from backend.api.errors import EngineUnavailable, EverbatchError, InvalidRequest
from backend.api.lora import LoraConfig, check_lora
from backend.api.request import Request, RequestId
from backend.core.adapter import PreparedAdapter
from backend.engine.core import EngineCore
from backend.scheduler.adapters import Name


@dataclass(slots=True)
class _Line:
    """The requests of one task id, in their order. The first one's adapter is being read, unless `first` holds it."""

    requests: list[tuple[RequestId, Request]] = field(default_factory=list)
    first: PreparedAdapter | EverbatchError | None = None


class AdapterDesk:
    def __init__(self, core: EngineCore, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called by any thread, when `admit` has something to do."""
        self._core = core
        self._on_ready = on_ready
        self._lines: dict[Name, _Line] = {}
        self._cancelled: set[RequestId] = set()
        self._read: queue.SimpleQueue[tuple[Name, PreparedAdapter | EverbatchError]] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def num_waiting(self) -> int:
        return sum(len(line.requests) for line in self._lines.values())

    def submit(self, request_id: RequestId, request: Request) -> None:
        """Hand a request to the engine, at once or when its adapter is there."""
        lora = request.lora
        if lora is None:
            self._core.enqueue(request_id, request)
            return
        name = (request.cache_salt, lora.task_id)
        line = self._lines.get(name)
        if line is None and not lora.brings_weights:
            self._core.enqueue(request_id, request)
            return
        try:
            check_lora(lora, self._core.adapters.is_enabled and self._core.model.lora_module_bytes > 0)
            if self.num_waiting >= self._core.config.limits.max_queue_size:
                raise InvalidRequest(
                    f"Exceeds maximum queue size: {self.num_waiting} requests wait for their adapters, the limit is "
                    f"{self._core.config.limits.max_queue_size} (limits.max_queue_size); try again later"
                )
        except EverbatchError as error:
            self._core.refuse(request_id, request.client_id, error)
            return
        if line is not None:
            line.requests.append((request_id, request))
            return
        self._lines[name] = _Line([(request_id, request)])
        self._begin(name, lora)

    def cancel(self, request_id: RequestId) -> bool:
        """Whether the request waits here; then it ends as soon as it is admitted."""
        if not any(request_id == each for line in self._lines.values() for each, _ in line.requests):
            return False
        self._cancelled.add(request_id)
        return True

    def live_ids(self) -> list[RequestId]:
        return [request_id for line in self._lines.values() for request_id, _ in line.requests]

    def admit(self) -> None:
        """Take in the adapters that have been read, and enqueue the requests that waited for them."""
        while not self._read.empty():
            name, outcome = self._read.get()
            if name in self._lines:
                self._lines[name].first = outcome
        for name, line in list(self._lines.items()):
            if line.first is not None:
                self._advance(name, line)

    def fail_all(self, error: EngineUnavailable) -> None:
        """Answer all that wait with `error`, and end the threads."""
        for line in self._lines.values():
            for request_id, request in line.requests:
                self._core.refuse(request_id, request.client_id, error)
        self._lines.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _advance(self, name: Name, line: _Line) -> None:
        """Enqueue the requests up to the next one that brings weights."""
        error = line.first if isinstance(line.first, EverbatchError) else None
        if isinstance(line.first, PreparedAdapter):
            try:
                if not self._core.adapters.put(name, line.first):
                    return  # later: those in use leave no room
            except InvalidRequest as refusal:
                error = refusal
        line.first = None
        self._enqueue(*line.requests.pop(0), error)
        while line.requests:
            lora = line.requests[0][1].lora
            assert lora is not None  # nobody waits without one
            if lora.brings_weights:
                self._begin(name, lora)
                return
            self._enqueue(*line.requests.pop(0), None)
        del self._lines[name]

    def _enqueue(self, request_id: RequestId, request: Request, error: EverbatchError | None) -> None:
        if error is not None:
            self._core.refuse(request_id, request.client_id, error)
        else:
            self._core.enqueue(request_id, request)
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            self._core.cancel(request_id)

    def _begin(self, name: Name, lora: LoraConfig) -> None:
        if self._threads is None:
            workers = self._core.config.lora.put_workers
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="everbatch-adapters")
        self._threads.submit(self._prepare, name, lora)

    def _prepare(self, name: Name, lora: LoraConfig) -> None:
        outcome: PreparedAdapter | EverbatchError
        try:
            outcome = self._core.workers.prepare_adapter(lora)
        except EverbatchError as error:
            outcome = error
        except Exception as error:  # whatever a file or a tensor does: the client must be answered
            outcome = InvalidRequest(f"LoRA adapter {lora.task_id} cannot be read ({type(error).__name__}: {error})")
        self._read.put((name, outcome))
        self._on_ready()
