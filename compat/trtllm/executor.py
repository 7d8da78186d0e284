"""TensorRT-LLM's Executor, over backend.executor.Executor.

A request that cannot be served gets an error response. All other errors raise RuntimeError, as in the bindings.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, overload

import msgspec

from backend.api import EngineConfig, EverbatchError
from backend.api import Response as Answer
from backend.api.request import RequestId
from backend.core.messages import Hello
from backend.core.step import ModelInfo
from backend.executor import Executor as Core
from backend.executor.own_processors import OF_REQUEST, OwnProcessors, PostProcessor, import_path
from compat.trtllm import from_core
from compat.trtllm.configs import ExecutorConfig
from compat.trtllm.decoding import GuidedDecodingConfig
from compat.trtllm.engine_config import engine_config, runs_in_own_process
from compat.trtllm.enums import ModelType
from compat.trtllm.kinds import PATH, STR, UINT64, FieldKind, list_of, of, optional
from compat.trtllm.kv_cache import KVCacheEvent, KVCacheEventManager
from compat.trtllm.other_rank import other_rank_of
from compat.trtllm.record import Record, field, shown
from compat.trtllm.repeats import Repeats
from compat.trtllm.request import Request
from compat.trtllm.results import Response
from compat.trtllm.statistics import DebugTensorsPerIteration, IterationStats, RequestStatsPerIteration
from compat.trtllm.to_core import to_core


def _buffer(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError
    return bytes(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return value


BUFFER = FieldKind("bytes", _buffer)
WEIGHTS = FieldKind("Dict[str, torch.Tensor]", _mapping)


class FromDirectory(Record):
    model_path: str = field(PATH)
    model_type: ModelType = field(of(ModelType))
    executor_config: ExecutorConfig = field(of(ExecutorConfig))


class FromBuffers(Record):
    engine_buffer: bytes = field(BUFFER)
    json_config_str: str = field(STR)
    model_type: ModelType = field(of(ModelType))
    executor_config: ExecutorConfig = field(of(ExecutorConfig))
    managed_weights: Mapping[str, Any] = field(WEIGHTS, factory=dict)


class FromTwoDirectories(Record):
    encoder_model_path: str = field(PATH)
    decoder_model_path: str = field(PATH)
    model_type: ModelType = field(of(ModelType))
    executor_config: ExecutorConfig = field(of(ExecutorConfig))


class FromTwoBuffers(Record):
    encoder_engine_buffer: bytes = field(BUFFER)
    encoder_json_config_str: str = field(STR)
    decoder_engine_buffer: bytes = field(BUFFER)
    decoder_json_config_str: str = field(STR)
    model_type: ModelType = field(of(ModelType))
    executor_config: ExecutorConfig = field(of(ExecutorConfig))


OVERLOADS = (FromDirectory, FromTwoDirectories, FromBuffers, FromTwoBuffers)


class Executor:
    """Runs a model, and serves requests in a persistent batch.

    Executor(model_path, model_type, executor_config)
        from the directory of a checkpoint: config.json, safetensors.
    Executor(engine_buffer, json_config_str, model_type, executor_config, managed_weights={})
        from the bytes of a safetensors file and the text of config.json; `managed_weights` are further tensors, by name.

    The forms with an encoder are refused: only decoder models are served. The engine runs in a thread of this process, or with
    `ParallelConfig(communication_mode=CommunicationMode.ORCHESTRATOR)` in a process of its own. Raises RuntimeError, which says
    `File does not exist` when there is no such directory, and names a part of the configuration that is not served.
    """

    @overload
    def __init__(self, model_path: str | Path, model_type: ModelType, executor_config: ExecutorConfig) -> None: ...
    @overload
    def __init__(
        self,
        engine_buffer: bytes | bytearray | memoryview,
        json_config_str: str,
        model_type: ModelType,
        executor_config: ExecutorConfig,
        managed_weights: Mapping[str, Any] = ...,
    ) -> None: ...
    @overload
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _chosen(args, kwargs)
        if isinstance(given, FromTwoDirectories | FromTwoBuffers) or given.model_type is not ModelType.DECODER_ONLY:
            raise RuntimeError(f"model_type is {given.model_type}: only ModelType.DECODER_ONLY is served")
        self._config: ExecutorConfig = given.executor_config.copied()
        self._own_processors = OwnProcessors()
        self._repeats = Repeats()
        with _runtime_errors():
            config = engine_config(given.executor_config)
            other = other_rank_of(config)
            self._core, directory = (
                _started(given, config, self._own_processors) if other is None else (cast(Core, other), "")
            )
        # It also runs when this object is garbage, or the program ends.
        self._close = weakref.finalize(self, _shut_down, self._core, directory, os.getpid())
        if other is None:
            with _runtime_errors():
                self._check_window()

    @property
    def _hello(self) -> Hello:
        hello = self._core.hello
        assert hello is not None  # the constructor returns only once the engine has been reached
        return hello

    @property
    def _model(self) -> ModelInfo:
        return self._hello.model

    def _check_window(self) -> None:
        windows, max_tokens = self._config.kv_cache_config.max_attention_window, self._hello.max_kv_tokens
        if not (self._config.fail_fast_on_attention_window_too_large and windows):
            return
        if max(windows) > max_tokens:
            self.shutdown()
            raise RuntimeError(
                f"the attention window is {max(windows)} tokens, the KV cache holds {max_tokens}; "
                f"raise kv_cache_config.max_tokens, or lower max_attention_window"
            )

    def enqueue_request(self, request: Request) -> int:
        """Send a request, and return its id at once."""
        if not isinstance(request, Request):
            raise TypeError(f"enqueue_request(): incompatible function arguments: {shown(request)} is no Request")
        with _runtime_errors():
            try:
                converted = to_core(request, self._model.vocab_size, self._config.max_beam_width)
            except EverbatchError as error:
                return self._core.enqueue_refusal(error, request.client_id)
            with self._repeats.adding, self._own_processors.adding:
                request_id = self._core.enqueue_request(converted)
                self._repeats.add(request_id, converted)
                if request.logits_post_processor is not None:
                    self._own_processors.add(request_id, request.logits_post_processor)
            return request_id

    def enqueue_requests(self, requests: list[Request]) -> list[int]:
        """Send several requests, and return their ids in the same order."""
        return [self.enqueue_request(request) for request in requests]

    @overload
    def await_responses(self, timeout: timedelta | None = None) -> list[Response]: ...
    @overload
    def await_responses(self, id: int, timeout: timedelta | None = None) -> list[Response]: ...
    @overload
    def await_responses(self, ids: list[int], timeout: timedelta | None = None) -> list[list[Response]]: ...

    def await_responses(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch responses: await_responses(timeout), await_responses(id, timeout) or await_responses(ids, timeout).

        Blocks until there is a response to any request, or to this one, at most for `timeout` (a timedelta; None: until
        `shutdown`), after which the list is empty. For several ids it returns a list for each. An unknown id, or one whose final
        response was fetched, gives one error response.
        """
        which, timeout = _awaited(args, kwargs)
        with _runtime_errors():
            answers = self._core.await_responses(which, timeout)
        if isinstance(which, list):
            return [[self._delivered(answer) for answer in each] for each in answers]  # type: ignore[union-attr]
        return [self._delivered(answer) for answer in answers]  # type: ignore[arg-type]

    def _delivered(self, answer: Answer) -> Response:
        if answer.is_final:
            self._own_processors.forget(answer.request_id)
        return self._repeats.complete(from_core.response(answer), answer.is_final)

    def get_num_responses_ready(self, id: int | None = None) -> int:
        """Number of responses that can be fetched, of one request or of all (None)."""
        with _runtime_errors():
            return self._core.get_num_responses_ready(optional(_ID).check(id))

    def cancel_request(self, id: int) -> None:
        """Cancel a request, which then gets a final response. Unknown ids are ignored."""
        self._check_open()
        with _runtime_errors():
            self._core.cancel_request(_ID.check(id))

    def can_enqueue_requests(self) -> bool:
        """True if the engine takes requests. False after `shutdown`, and in a process that is not rank 0."""
        return self._core.can_enqueue_requests()

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Statistics of the iterations since the last call, at most `iter_stats_max_iterations`."""
        with _runtime_errors():
            taken = self._core.take_iteration_stats()
        stats = self._core.latest_stats()
        return [from_core.iteration_stats(each, self._hello, each if stats is None else stats.latest) for each in taken]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """The requests in the iterations since the last call, at most `request_stats_max_iterations` (0: none are kept)."""
        with _runtime_errors():
            return [from_core.request_stats(each) for each in self._core.take_request_stats()]

    def get_latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """The tensors of the iterations since the last call, at most `debug_config.debug_tensors_max_iterations`."""
        with _runtime_errors():
            return [from_core.debug_tensors(each) for each in self._core.take_debug_tensors()]

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """Hands out the events of the KV cache; None unless `kv_cache_config.event_buffer_max_size` is more than 0."""
        self._check_open()
        if not self._config.kv_cache_config.event_buffer_max_size:
            return None
        return KVCacheEventManager(self._take_events)

    def shutdown(self) -> None:
        """End the Executor and wake all waiting threads. Requests that run are answered with an error. In a process that is not
        rank 0 it waits for rank 0 to do so.
        """
        self._close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _take_events(self, timeout_s: float | None) -> list[KVCacheEvent]:
        with _runtime_errors():
            return [from_core.kv_event(event, self._model) for event in self._core.take_kv_events(timeout_s)]

    def _check_open(self) -> None:
        if not self._close.alive:
            raise RuntimeError("the executor has been shut down; make a new one")


_ID = FieldKind("int", lambda value: RequestId(UINT64.check(value)))
_IDS = list_of(_ID)


def _chosen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first overload that takes the arguments."""
    for overloaded in OVERLOADS:
        try:
            return overloaded(*args, **kwargs)
        except TypeError:
            continue  # the next overload may take them
    invoked = [shown(value) for value in args] + [f"{name}={shown(value)}" for name, value in kwargs.items()]
    raise TypeError(
        "__init__(): incompatible constructor arguments. The following argument types are supported:\n"
        + "\n".join(f"    {i}. Executor{each.__signature__}" for i, each in enumerate(OVERLOADS, 1))  # type: ignore[attr-defined]
        + f"\n\nInvoked with: {', '.join(invoked)}"
    )


def _started(given: FromDirectory | FromBuffers, config: EngineConfig, own: OwnProcessors) -> tuple[Core, str]:
    """The engine's Executor, and the directory of its socket if the engine is a process of its own."""
    parallel = given.executor_config.parallel_config
    own_process = runs_in_own_process(parallel)
    processors = given.executor_config.logits_post_processor_config
    by_name: dict[str, PostProcessor] = {OF_REQUEST: own}
    if processors is not None:
        by_name |= {name: each for name, each in (processors.processor_map or {}).items() if each is not None}
    batched = None if processors is None else processors.processor_batched
    if parallel is not None and parallel.device_ids:
        config = _on_device(config, parallel.device_ids[0])
    if isinstance(given, FromBuffers) and own_process:
        raise RuntimeError("an engine process reads a directory; give a model_path, or CommunicationMode.LEADER")
    guided = given.executor_config.guided_decoding_config
    directory = tempfile.mkdtemp(prefix="everbatch-") if own_process or guided is not None else ""
    try:
        if guided is not None and guided.encoded_vocab is not None:
            config = _with_vocabulary(config, guided, directory)
        if isinstance(given, FromBuffers):
            return Core.from_buffers(_tensors(given), given.json_config_str, config, by_name, batched), directory
        if not own_process:
            return Core.from_directory(given.model_path, config, by_name, batched), directory
        config = _own_process(given, config, by_name, batched)
        return Core.launch(config, f"{directory}/engine.sock", owns_directory=True), directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _with_vocabulary(config: EngineConfig, guided: GuidedDecodingConfig, directory: str) -> EngineConfig:
    """The configuration with the vocabulary of guided decoding in a file, because the engine may be another process."""
    path = f"{directory}/tokenizer_info.json"
    names = ("encoded_vocab", "tokenizer_str", "stop_token_ids")
    Path(path).write_bytes(msgspec.json.encode({name: getattr(guided, name) for name in names}))
    return msgspec.structs.replace(config, guided=msgspec.structs.replace(config.guided, tokenizer_info=path))


def _own_process(
    given: FromDirectory, config: EngineConfig, by_name: Mapping[str, PostProcessor], batched: PostProcessor | None
) -> EngineConfig:
    """The configuration of an engine process: it imports post-processors."""
    own = by_name[OF_REQUEST]
    model = msgspec.structs.replace(
        config.model,
        path=given.model_path,
        logits_post_processors=tuple(
            f"{name}={import_path(name, each)}" for name, each in by_name.items() if each is not own
        ),
        batched_logits_post_processor=None if batched is None else import_path("batched", batched),
    )
    return msgspec.structs.replace(config, model=model)


def _on_device(config: EngineConfig, device_id: int) -> EngineConfig:
    """The configuration with this GPU. On a machine without GPUs the id of a device has no effect."""
    import torch

    if not torch.cuda.is_available():
        return config
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, device=f"cuda:{device_id}"))


def _tensors(given: FromBuffers) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(given.engine_buffer) if given.engine_buffer else {}
    except SafetensorError:
        raise RuntimeError(
            f"engine_buffer has {len(given.engine_buffer)} bytes that are no safetensors file; give the bytes of one"
        ) from None
    return {**tensors, **given.managed_weights}


def _shut_down(core: Core, directory: str, owner_pid: int) -> None:
    """End the engine. Does nothing in a process that was forked from the engine's owner."""
    if os.getpid() != owner_pid:
        return
    core.shutdown()
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


def _awaited(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, timedelta | None]:
    """(id, ids or None, timeout): the first positional argument says which form it is."""
    names = ["timeout"] if not args or args[0] is None or isinstance(args[0], timedelta) else ["which", "timeout"]
    given = dict(zip(names, args))
    rest = {("which" if name in ("id", "ids") else name): value for name, value in kwargs.items()}
    timeout, which = {**given, **rest}.get("timeout"), {**given, **rest}.get("which")
    fits = len(args) <= len(names) and not given.keys() & rest.keys() and rest.keys() <= {"which", "timeout"}
    if not fits or not (timeout is None or isinstance(timeout, timedelta)):
        raise TypeError(
            "await_responses(): incompatible function arguments. The following argument types are supported:\n"
            "    1. (timeout: Optional[datetime.timedelta] = None) -> List[Response]\n"
            "    2. (id: int, timeout: Optional[datetime.timedelta] = None) -> List[Response]\n"
            "    3. (ids: List[int], timeout: Optional[datetime.timedelta] = None) -> List[List[Response]]"
        )
    if which is None:
        return None, timeout
    return (_IDS if isinstance(which, list | tuple) else _ID).check(which), timeout


@contextmanager
def _runtime_errors() -> Iterator[None]:
    """Turn the engine's errors into the RuntimeErrors that the bindings raise."""
    try:
        yield
    except EverbatchError as error:
        raise RuntimeError(str(error)) from error
