"""GptManager: TensorRT-LLM's batch manager. It converts named tensors for a CallbackLoop, and its responses to tensors."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backend.api import ConfigError, EngineConfig, EverbatchError, InvalidRequest, Request, Response, Result
from backend.api.stats import EngineStats, IterationStats
from backend.api.tensor import TensorData
from backend.executor.own_processors import OF_REQUEST, OwnProcessors
from compat.tensorrt_llm import as_tensor
from compat.trtllm import tensor_names as names
from compat.trtllm.callback_loop import CallbackLoop, load_engine
from compat.trtllm.configs import ExecutorConfig, KvCacheConfig, ParallelConfig
from compat.trtllm.engine_config import BASE, engine_config, runs_in_own_process
from compat.trtllm.gpt_configs import SEED_TIMESTAMP, TrtGptModelOptionalParams, TrtGptModelType
from compat.trtllm.inference_request import InferenceRequest, NamedTensor, to_request
from compat.trtllm.to_core import to_core

GetInferenceRequests = Callable[[int], Iterable[InferenceRequest]]
SendResponse = Callable[[int, list[NamedTensor], bool, str], None]
PollStopSignal = Callable[[], Iterable[int]]
ReturnStats = Callable[[str], None]

_BATCHING = {
    TrtGptModelType.V1: "static",
    TrtGptModelType.InflightBatching: "separate",
    TrtGptModelType.InflightFusedBatching: "fused",
}


class _LiveRequest(NamedTuple):
    """Properties of a request that decide its output tensors. `num_sent`: tokens streamed so far, by sequence index."""

    num_prompt_tokens: int
    max_tokens: int
    pad_id: int
    streaming: bool
    has_beams: bool
    num_sequences: int
    num_sent: Counter[int]


class GptManager:
    """Runs the token loop in a thread of its own, from construction on, and talks to its owner through callbacks only.

    Each iteration calls `get_inference_requests_cb(max count)` for new requests; `send_response_cb(id, tensors, is final, error)`
    for each request with output, whose memory has been freed before its final call; `poll_stop_signal_cb()` for the ids
    of requests to be cancelled; `return_batch_manager_stats_cb(json)` if there was work.
    An error comes with is final = True. With `num_return_sequences` above 1 each call holds one sequence, which its
    `sequence_index` names; only the last call is final. Ids that are in use are refused, and may be used again from the
    final call on.
    `terminate_req_id`: a request with this id ends the manager, after all active requests.

    Leaving its context, or `shutdown()`, finishes all active requests first.
    """

    def __init__(
        self,
        trt_engine_path: str | Path,
        model_type: TrtGptModelType,
        get_inference_requests_cb: GetInferenceRequests,
        send_response_cb: SendResponse,
        poll_stop_signal_cb: PollStopSignal | None = None,
        return_batch_manager_stats_cb: ReturnStats | None = None,
        optional_params: TrtGptModelOptionalParams | None = None,
        terminate_req_id: int | None = None,
    ) -> None:
        """Raises RuntimeError when there is no such directory, or for a parameter that is not served."""
        params = optional_params or TrtGptModelOptionalParams()
        self._get_requests, self._send_response = get_inference_requests_cb, send_response_cb
        self._terminate_req_id = terminate_req_id
        self._params = params
        self._processors = OwnProcessors()
        self._asked: dict[int, _LiveRequest] = {}
        self._ended = False
        try:
            config = _engine_config(model_type, params)
            self._engine = load_engine(str(trt_engine_path), config, {OF_REQUEST: self._processors})
        except ConfigError as error:
            raise RuntimeError(str(error)) from error
        self._num_bytes = self._engine.max_kv_tokens * self._engine.model.kv_bytes_per_token
        MemoryCounters.instance().add_gpu(self._num_bytes)
        stats_format = params.stats_timestamp_format

        def return_stats(stats: EngineStats) -> None:
            if return_batch_manager_stats_cb is not None:
                return_batch_manager_stats_cb(
                    stats_json(self._engine.latest_iteration(), stats, model_type, stats_format)
                )

        self._ending = threading.Event()  # made here, because the thread may set it before the constructor is over
        callbacks = (self._take_in, self._send, poll_stop_signal_cb or _nothing, return_stats)
        self._loop = CallbackLoop(self._engine, *callbacks, ending=self._ending)

    @property
    def is_alive(self) -> bool:
        """True if the worker thread runs."""
        return self._loop.worker_thread.is_alive()

    def shutdown(self) -> None:
        """Accept no more requests, finish the active ones, end the worker thread, and free the memory."""
        self._loop.shutdown()
        if not self._ended:
            self._ended = True
            MemoryCounters.instance().add_gpu(-self._num_bytes)

    def __enter__(self) -> GptManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _take_in(self, max_count: int) -> Iterator[tuple[int, Request]]:
        for given in self._get_requests(max_count):
            if given.request_id == self._terminate_req_id:
                self._ending.set()
                continue
            try:
                request = self._converted(given)
            except EverbatchError as error:
                self._send_response(given.request_id, [], True, error.message)
                continue
            yield given.request_id, request

    def _converted(self, given: InferenceRequest) -> Request:
        if given.request_id in self._asked:
            raise InvalidRequest(
                f"request id {given.request_id} is in use by a request that is still processed; choose another"
            )
        asked = to_request(given)
        output, params = (
            asked.output_config,
            self._params,
        )  # without its flag a kind of logits is a dummy, asked for or not
        output.return_context_logits &= params.gather_context_logits
        output.return_generation_logits &= params.gather_generation_logits
        request = to_core(asked, self._engine.model.vocab_size, params.max_beam_width)
        if given.logits_post_processor is not None:
            self._processors.add(given.request_id, given.logits_post_processor)
        self._asked[given.request_id] = _LiveRequest(
            len(request.input_token_ids),
            request.max_tokens,
            max(0, asked.pad_id or 0),
            request.streaming,
            request.sampling_config.beam_width > 1,
            request.sampling_config.num_return_sequences or 1,
            Counter(),
        )
        return request

    def _send(self, request_id: int, response: Response | None, is_final: bool, error: str) -> None:
        asked = self._asked.pop(request_id)  # before the final call, inside which the id may be used again
        tensors: list[NamedTensor] = []
        if response is not None:
            tensors = _tensors(response.result, asked)
        if is_final:
            self._processors.forget(request_id)
        else:
            self._asked[request_id] = asked
        self._send_response(request_id, tensors, is_final, error)


def _nothing() -> tuple[int, ...]:
    return ()


def _engine_config(model_type: TrtGptModelType, params: TrtGptModelOptionalParams) -> EngineConfig:
    runs_in_own_process(ParallelConfig(device_ids=params.device_ids))
    kv_cache = params.kv_cache_config
    config = ExecutorConfig(
        params.max_beam_width,
        params.scheduler_config,
        KvCacheConfig(
            kv_cache.enable_block_reuse,
            kv_cache.max_tokens,
            kv_cache.max_attention_window,
            kv_cache.sink_token_length,
            kv_cache.free_gpu_memory_fraction,
        ),
        params.enable_chunked_context,
        max_batch_size=params.max_batch_size,
        max_num_tokens=params.max_num_tokens,
        max_queue_size=EngineConfig().limits.max_queue_size,
        enable_trt_overlap=params.enable_trt_overlap,
        peft_cache_config=params.peft_cache_manager_config,
    )
    if BASE in params.__dict__:
        setattr(config, BASE, params.__dict__[BASE])
    converted = engine_config(config)
    scheduler = msgspec.structs.replace(converted.scheduler, batching=_BATCHING[model_type])
    return msgspec.structs.replace(converted, scheduler=scheduler)


def _tensors(result: Result, asked: _LiveRequest) -> list[NamedTensor]:
    """Tensors on the CPU, in the shapes of TensorRT-LLM's page on the batch manager. Adds streamed tokens to `num_sent`.

    `output_ids` [1, beams, longest]: all tokens, padded with the pad id; in a stream only the new ones, or all outputs so far
    with beams. `sequence_length` [1, 1], of the best beam. `sequence_index` [1, 1], only with several sequences.
    Logits that were not asked for are one zero.
    """
    import torch

    beams = result.output_token_ids
    if asked.streaming:
        before = 0 if asked.has_beams else asked.num_sent[result.sequence_index]
        asked.num_sent[result.sequence_index] = before + len(beams[0])
        num_tokens = asked.num_prompt_tokens + before + len(beams[0])
        length = max(map(len, beams))
    else:
        num_tokens = len(beams[0])
        length = asked.num_prompt_tokens + asked.max_tokens
    padded = [(tokens + [asked.pad_id] * length)[:length] for tokens in beams]
    tensors = {
        names.OUTPUT_IDS: torch.tensor([padded], dtype=torch.int32),
        names.SEQUENCE_LENGTH: torch.tensor([[num_tokens]], dtype=torch.int32),
        names.CONTEXT_LOGITS: _or_dummy(result.context_logits, 3),
        names.GENERATION_LOGITS: _or_dummy(result.generation_logits, 4),
    }
    if asked.num_sequences > 1:
        tensors[names.SEQUENCE_INDEX] = torch.tensor([[result.sequence_index]], dtype=torch.int32)
    if result.log_probs is not None:
        longest = max(map(len, result.log_probs))
        tensors[names.OUTPUT_LOG_PROBS] = torch.tensor(
            [[row + [0.0] * (longest - len(row)) for row in result.log_probs]]
        )
    if result.cum_log_probs is not None:
        tensors[names.CUM_LOG_PROBS] = torch.tensor([result.cum_log_probs])
    return [NamedTensor(name, tensor) for name, tensor in tensors.items()]


def _or_dummy(given: TensorData | None, num_dimensions: int) -> Any:
    """The tensor with a leading dimension of 1, or one zero."""
    import torch

    return torch.zeros([1] * num_dimensions) if given is None else as_tensor(given)[None]


def stats_json(
    latest: IterationStats,
    stats: EngineStats,
    model_type: TrtGptModelType = TrtGptModelType.InflightFusedBatching,
    timestamp_format: str = SEED_TIMESTAMP,
) -> str:
    """An iteration as JSON, under the names of the batch manager's page and some that TensorRT-LLM has added since."""
    kv, memory = latest.kv_cache, stats.latest
    tree: dict[str, Any] = {
        "Timestamp": datetime.fromtimestamp(latest.timestamp_ns / 1e9, UTC).astimezone().strftime(timestamp_format),
        "Iteration Counter": latest.iter,
        "Active Request Count": latest.num_active_requests,
        "Max Request Count": latest.max_num_active_requests,
        "Max KV cache blocks": kv.max_num_blocks,
        "Free KV cache blocks": kv.max_num_blocks - kv.used_num_blocks,
        "Used KV cache blocks": kv.used_num_blocks,
        "Tokens per KV cache block": kv.tokens_per_block,
        "Reused KV cache blocks": kv.reused_blocks_total,
        "Scheduled Requests": latest.num_scheduled_requests,
        "Context Requests": latest.num_context_requests,
        "Paused Requests": latest.num_paused_requests,
        "Waiting Requests": latest.num_queued_requests,
        "Total Context Tokens": latest.num_ctx_tokens,
        "Runtime CPU Memory Usage": memory.cpu_memory_bytes,
        "Runtime GPU Memory Usage": memory.gpu_memory_bytes,
        "Runtime Pinned Memory Usage": 0,
    }
    if model_type is TrtGptModelType.V1:  # each generating row gets one token
        tree |= {
            "Total Generation Tokens": latest.num_gen_requests,
            "Empty Generation Slots": latest.num_empty_gen_slots,
        }
    else:
        tree |= {"Generation Requests": latest.num_gen_requests, "MicroBatch ID": latest.micro_batch_id}
    return json.dumps(tree)


_lock = threading.Lock()


class MemoryCounters:
    """Bytes by kind of memory. `gpu`: the KV pools, on any device; the other kinds are not used."""

    _the_one: MemoryCounters | None = None

    def __init__(self) -> None:
        self.gpu = self.cpu = self.pinned = 0
        self.gpu_diff = 0

    @classmethod
    def instance(cls) -> MemoryCounters:
        """The single object of this process."""
        with _lock:
            cls._the_one = cls._the_one or cls()
            return cls._the_one

    def add_gpu(self, num_bytes: int) -> None:
        """`num_bytes` were obtained, or freed if negative."""
        with _lock:
            self.gpu += num_bytes
            self.gpu_diff = num_bytes

    def __repr__(self) -> str:
        return f"MemoryCounters(gpu={self.gpu}, cpu={self.cpu}, pinned={self.pinned})"
