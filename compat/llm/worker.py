"""GenerationExecutorWorker: a GenerationExecutor over the Executor, and GenerationExecutorProxy over an engine process.

    engine's thread     hands a response over
    dispatch thread     finds its request; makes text of it, or gives it to the post-processing process of the request
    caller's thread     takes the text from the queue of its result

A request is forgotten once its final response has been dispatched.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from backend.api import EngineConfig, EngineUnavailable, EverbatchError, Request, RequestId, Response
from backend.executor import Executor
from backend.executor.own_processors import OF_REQUEST, OwnProcessors, import_path
from backend.text.tokenizer import Tokenizer
from compat.llm import logits
from compat.llm.arguments import PROGRAM, with_model, with_model_fields
from compat.llm.chat import ChatTokenizer
from compat.llm.errors import BackgroundError, NotHere, ParameterError
from compat.llm.executor import LOGITS_AND_WORKERS, GenerationExecutor
from compat.llm.images import PromptImages
from compat.llm.mapping import core_request, text_params
from compat.llm.postprocessing import (
    END_GRACE_S,
    LOST,
    PROCESS,
    PostprocInput,
    PostprocPool,
    PostprocWorker,
    PostprocWorkerConfig,
)
from compat.llm.requests import GenerationRequest
from compat.llm.result import GenerationResult
from compat.llm.result_queue import ResultQueue
from compat.llm.statistics import LatestStats, as_json, event_as_json, requests_as_json
from compat.llm.updates import RequestUpdate, TextParams

log = logging.getLogger("everbatch.llm")
FAILED = "the thread that hands out responses has failed, and no request is answered any more; make a new executor"


class _Live:
    """State of a request until its final response."""

    def __init__(self, result_queue: ResultQueue[RequestUpdate | Exception], params: TextParams) -> None:
        self.queue = result_queue
        self.params: TextParams | None = params  # None once they were handed to the detokeniser
        self.request_id: RequestId | None = None  # None until the engine has been given the request
        self.is_unwanted = False  # it has ended here, and the engine has to cancel it


class _Arrival(NamedTuple):
    client_id: int
    response: Response


class GenerationExecutorWorker(GenerationExecutor):
    """A GenerationExecutor that owns its Executor, whose engine runs in this process or in another."""

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        tokenizer_dir: str = "",
        postprocess: PostprocWorkerConfig | None = None,
        stream_interval: int = 1,
        postprocess_module: str = PROCESS,
        on_shutdown: Callable[[], None] = lambda: None,
        processors: OwnProcessors | None = None,
    ) -> None:
        """`tokenizer_dir` is where the post-processing processes find the tokenizer, if there are any.

        `processors`: the logits processors of requests, for an engine in this process.
        """
        super().__init__()
        hello = executor.hello
        if hello is None:
            raise EngineUnavailable("the engine is not ready yet; try again in a few seconds")
        self.engine_executor = executor
        self.hello = hello
        self.tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._processors = OwnProcessors() if processors is None else processors
        self._results: dict[int, _Live] = {}
        self._lock = threading.Lock()
        self._arrivals: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._failure: BackgroundError | None = None
        self._is_shut_down = False
        self._pid = os.getpid()
        self._on_shutdown = on_shutdown
        self._last_iter = -1
        self._inline = PostprocWorker(tokenizer)
        self._images = PromptImages(model_directory(executor), hello.model, hello.config.images, tokenizer)
        self._pool: PostprocPool | None = None
        if postprocess is not None and postprocess.enabled:
            self._pool = PostprocPool(
                postprocess, tokenizer_dir, self._deliver, self._lose_worker, module=postprocess_module
            )
        self._thread = threading.Thread(target=self._dispatch, name="llm-dispatch", daemon=True)
        self._thread.start()
        atexit.register(_shutdown_at_exit, weakref.ref(self))

    @classmethod
    def of_model(
        cls,
        model: Any = None,
        config: EngineConfig | None = None,
        tokenizer_dir: Any = None,
        postprocess: PostprocWorkerConfig | None = None,
        with_tokenizer: bool = True,
        stream_interval: int = 1,
        batched_logits_processor: Callable[..., Any] | None = None,
    ) -> GenerationExecutorWorker:
        """Over a checkpoint: its directory, a hub id, or None for the one that the configuration names.

        Without a configuration PROGRAM holds. `tokenizer_dir` may also be a Tokenizer. Raises ConfigError and EngineUnavailable.
        """
        if config is not None and not isinstance(config, EngineConfig):
            raise TypeError(f"the configuration is a {type(config).__name__}, a backend.api.EngineConfig is needed")
        if isinstance(tokenizer_dir, Tokenizer) and postprocess is not None and postprocess.enabled:
            if not postprocess.postprocess_tokenizer_dir:
                raise ParameterError(
                    "the tokenizer is an object, which post-processing processes cannot be given; "
                    "set postprocess_tokenizer_dir to its directory"
                )
        if not with_tokenizer and postprocess is not None and postprocess.enabled:
            raise ParameterError(
                "post-processing processes make text, and the tokenizer is left out; set num_postprocess_workers to 0"
            )
        own = OwnProcessors()
        executor, clean_up = cls.start_engine(with_model(config or PROGRAM, model), own, batched_logits_processor)
        try:
            given, directory = tokenizer_dir, model_directory(executor)
            if given is not None and not isinstance(given, Tokenizer):
                given, directory = None, str(tokenizer_dir)
            tokenizer = given or (ChatTokenizer.from_directory(directory) if with_tokenizer else None)
            return cls(
                executor, tokenizer, directory, postprocess, stream_interval, on_shutdown=clean_up, processors=own
            )
        except BaseException:
            executor.shutdown()
            clean_up()
            raise

    @classmethod
    def start_engine(
        cls, config: EngineConfig, own: OwnProcessors, batched: Callable[..., Any] | None
    ) -> tuple[Executor, Callable[[], None]]:
        """A ready engine, and a function to call after its shutdown.

        `own`: the logits processors of single requests. `batched`: the processor of all requests that opt in.
        """
        of_all = None if batched is None else logits.batched(batched)
        return Executor.from_directory(config.model.path, config, {OF_REQUEST: own}, of_all), lambda: None

    @property
    def postprocess_pids(self) -> list[int]:
        return [] if self._pool is None else self._pool.pids

    def place_images(self, request: GenerationRequest) -> None:
        """Put the pictures of a request into its prompt, as `submit` does unless this was called. Takes milliseconds for each."""
        self._images.place(request)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        self._check_open()
        self.place_images(request)
        params = request.sampling_params
        returns_tensors = (
            params.return_context_logits or params.return_generation_logits or params.additional_model_outputs
        )
        if self._pool is not None and returns_tensors:
            raise ParameterError(LOGITS_AND_WORKERS)
        request.set_id(self._get_next_client_id())
        caps = self.hello.config.limits.max_top_log_probs
        core = core_request(request, self.tokenizer, self.hello.model, caps)
        result = GenerationResult(request, self)
        assert request.id is not None
        live = _Live(result.queue, text_params(request, self.tokenizer, self._stream_interval))
        if params.logits_processor is None:
            self._send(request.id, core, live)
            return result
        processor = logits.in_order(params.logits_processor)
        with self._processors.adding:
            self._processors.add(self._send(request.id, core, live), processor)
        return result

    def abort_request(self, request_id: int) -> None:
        with self._lock:
            live = self._results.get(request_id)
            engine_id = None if live is None else live.request_id
        if engine_id is None:
            log.warning("request %d is over or unknown; there is nothing to abort", request_id)
            return
        self.engine_executor.cancel_request(engine_id)

    def iteration_stats(self) -> list[dict[str, Any]]:
        """All kept records (`records.max_iterations`); where none are kept, the newest state that the engine has reported."""
        if not self.hello.config.records.max_iterations:
            return self._newest_stats()
        requests = {each.iter: requests_as_json(each) for each in self.engine_executor.take_request_stats()}
        records = [as_json(stats) for stats in self.engine_executor.take_iteration_stats()]
        for record in records:
            if record["iter"] in requests:
                record["requestStats"] = requests[record["iter"]]
        return records

    def get_latest_stats(self) -> LatestStats:
        stats = self.engine_executor.latest_stats()
        if stats is None:
            return LatestStats()
        latest = stats.latest
        return LatestStats(latest.num_active_requests, latest.num_queued_requests, latest.num_scheduled_requests)

    def kv_events(self) -> list[dict[str, Any]]:
        if not self.hello.config.records.max_kv_events:
            raise NotHere("events of the KV cache are not kept; set event_buffer_max_size of kv_cache_config")
        return [event_as_json(event) for event in self.engine_executor.take_kv_events()]

    def shutdown(self) -> None:
        if os.getpid() != self._pid:
            return  # the engine belongs to the process from which this one was forked
        with self._lock:
            if self._is_shut_down:
                return
            self._is_shut_down = True
        self.engine_executor.shutdown()  # It answers all live requests.
        self._arrivals.put(None)
        if self._pool is not None:
            self._thread.join(END_GRACE_S)  # A process that hangs would block this for ever.
            self._pool.close()
        self._thread.join()
        self._fail_all(EngineUnavailable("the executor has been shut down; make a new one"))
        self._images.close()
        self._on_shutdown()

    def _newest_stats(self) -> list[dict[str, Any]]:
        stats = self.engine_executor.latest_stats()
        if stats is None or stats.latest.iter <= self._last_iter:
            return []
        self._last_iter = stats.latest.iter
        return [as_json(stats.latest)]

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_shut_down:
            raise EngineUnavailable("the executor has been shut down; make a new one")

    def _send(self, client_id: int, core: Request, live: _Live) -> RequestId:
        """Send the request, and return the id that the engine has given it."""
        with self._lock:
            self._results[client_id] = live  # It must be registered before its first response arrives.
        try:
            engine_id = self.engine_executor.submit(
                core, lambda response: self._arrivals.put(_Arrival(client_id, response))
            )
        except EverbatchError:
            with self._lock:
                self._results.pop(client_id, None)
            raise
        with self._lock:
            live.request_id = engine_id
            is_unwanted = live.is_unwanted
        if is_unwanted:
            self.engine_executor.cancel_request(engine_id)
        if self._failure is not None:  # The failure came first, and did not end this request.
            self._fail_all(self._failure)
        return engine_id

    def _dispatch(self) -> None:
        """Pass responses on until the shutdown. An exception here ends all requests with the same error."""
        try:
            while (arrival := self._arrivals.get()) is not None:
                self._hand_on(arrival)
        except Exception as error:
            log.exception("handing out responses failed")
            self._failure = BackgroundError(FAILED)
            self._failure.__cause__ = error
            self._fail_all(self._failure)

    def _hand_on(self, arrival: _Arrival) -> None:
        with self._lock:
            live = self._results.get(arrival.client_id)
        if arrival.response.is_final and len(self._processors):
            self._processors.forget(arrival.response.request_id)
        if live is None:  # The request has already ended, by a stop string for instance.
            return
        params, live.params = live.params, None
        streaming = params is not None and params.streaming
        given = PostprocInput(arrival.response, arrival.client_id, params, None, streaming)
        if self._pool is None:
            output = self._inline.handle(given)
            if output is not None:
                self._deliver(output)
            return
        try:
            self._pool.send(given)
        except BackgroundError as error:
            self._fail(arrival.client_id, error)

    def _deliver(self, output: RequestUpdate) -> None:
        """Put an update into the queue of its request. Called by the dispatch thread or the reader thread of a process."""
        with self._lock:
            live = self._results.pop(output.client_id, None) if output.is_final else self._results.get(output.client_id)
        if live is None:
            return
        live.queue.put(output)
        if output.wants_cancel:
            self._cancel(live)

    def _cancel(self, live: _Live) -> None:
        """Cancel a request in the engine, because its result is no longer wanted."""
        with self._lock:
            live.is_unwanted = True
            engine_id = live.request_id
        if (
            engine_id is not None
        ):  # Without an id it is being submitted, and that thread looks at `is_unwanted` afterwards.
            self.engine_executor.cancel_request(engine_id)

    def _lose_worker(self, number: int) -> None:
        """A post-processing process has ended by itself: its requests fail."""
        log.error("post-processing process %d has ended", number)
        pool = self._pool
        if pool is None:  # It ended before the first request; later requests get the error.
            return
        with self._lock:
            lost = [client_id for client_id in self._results if pool.worker_of(client_id) == number]
        for client_id in lost:
            self._fail(client_id, BackgroundError(LOST))

    def _fail(self, client_id: int, error: Exception) -> None:
        with self._lock:
            live = self._results.pop(client_id, None)
        if live is not None:
            live.queue.put(error)
            self._cancel(live)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            lost = list(self._results)
        for client_id in lost:
            self._fail(client_id, error)


class GenerationExecutorProxy(GenerationExecutorWorker):
    """The engine runs in a process of its own, which is started again when it dies."""

    @classmethod
    def start_engine(
        cls, config: EngineConfig, own: OwnProcessors, batched: Callable[..., Any] | None
    ) -> tuple[Executor, Callable[[], None]]:
        path = config.model.path
        if path and Path(path).exists():  # The process has a working directory of its own.
            config = with_model(config, Path(path).absolute())
        if batched is not None:
            config = with_model_fields(config, batched_logits_post_processor=import_path("batched", batched))
        directory = tempfile.mkdtemp(prefix="everbatch-llm-")
        clean_up = partial(shutil.rmtree, directory, ignore_errors=True)
        try:
            return Executor.launch(config, str(Path(directory, "engine.sock")), owns_directory=True), clean_up
        except BaseException:
            clean_up()
            raise


def model_directory(executor: Executor) -> str:
    """The directory of the engine's checkpoint, which holds its tokenizer."""
    assert executor.hello is not None, "the engine is ready"
    return executor.hello.model_path


def _shutdown_at_exit(reference: weakref.ref[GenerationExecutorWorker]) -> None:
    executor = reference()
    if executor is not None:
        executor.shutdown()
