"""GenerationExecutor: accepts generation requests and returns futures of their results. Abstract; `create` makes one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from backend.api import EngineConfig
from compat.llm.errors import NotHere, ParameterError, refuse
from compat.llm.postprocessing import PostprocWorkerConfig
from compat.llm.requests import GenerationRequest
from compat.llm.result import GenerationResult
from compat.llm.sampling_params import SamplingParams
from compat.llm.statistics import IterationResult, LatestStats

UINT64 = 1 << 64


class GenerationExecutor(ABC):
    def __init__(self) -> None:
        self._last_client_id = 0
        self._id_lock = threading.Lock()

    @abstractmethod
    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Hand a request over, and return its future at once. The request gets its id.

        Raises NotHere for what this version does not have, ParameterError for what cannot be, and EngineUnavailable. All
        else that is wrong with a request ends its result with a RequestError.
        """

    @abstractmethod
    def abort_request(self, request_id: int) -> None:
        """Cancel a request, by its client id. For a request that has already ended only a warning is logged."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the executor and its engine. Results that are pending fail. Calling it again does nothing."""

    @abstractmethod
    def iteration_stats(self) -> list[dict[str, Any]]:
        """The records of iterations since the last call that were kept."""

    @abstractmethod
    def get_latest_stats(self) -> LatestStats:
        """The state after the newest step that the engine has reported."""

    @abstractmethod
    def kv_events(self) -> list[dict[str, Any]]:
        """The changes of the KV cache since the last call. Raises NotHere where the engine does not report them."""

    def generate_async(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams,
        query_token_ids: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        prompt_tuning_config: Any = None,
        mrope_config: Any = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        postproc_params: Any = None,
        **fields: Any,
    ) -> GenerationResult:
        """Submit one prompt of token ids. `fields` are further ones of GenerationRequest. Raises TypeError for wrong types."""
        if prompt_tuning_config is not None or mrope_config is not None:
            name = "mrope_config" if prompt_tuning_config is None else "prompt_tuning_config"
            raise NotHere(f"{name} is set, and the models take tokens only; leave it out")
        return self.submit(
            GenerationRequest(
                prompt_token_ids,
                sampling_params,
                query_token_ids=query_token_ids,
                lora_request=lora_request,
                prompt_adapter_request=prompt_adapter_request,
                streaming=streaming,
                kv_cache_retention_config=kv_cache_retention_config,
                disaggregated_params=disaggregated_params,
                postproc_params=postproc_params,
                **fields,
            )
        )

    def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams],
        **fields: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Submit one prompt or a list of them, and block until all have ended. Returns one result, or a list in the same order.

        `sampling_params`: one value for all prompts, or a list with one for each. Raises the first error of a request.
        """
        if not _is_batch(prompt_token_ids):
            if not isinstance(sampling_params, SamplingParams):
                raise TypeError("sampling_params is a list, and there is one prompt; give SamplingParams")
            return self.generate_async(prompt_token_ids, sampling_params, **fields).result()
        prompts = list(prompt_token_ids)
        each = for_each("sampling_params", sampling_params, len(prompts))
        results = [self.generate_async(prompt, params, **fields) for prompt, params in zip(prompts, each)]
        return [result.result() for result in results]

    def get_stats(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        """Records of iterations since the last call; waits up to `timeout` seconds for the first."""
        return IterationResult(self.iteration_stats, timeout).get_results()

    def aget_stats(self, timeout: float = 2.0) -> IterationResult:
        """An asynchronous iterator over records of iterations; ends when none comes for `timeout` seconds."""
        return IterationResult(self.iteration_stats, timeout)

    def get_kv_events(self, timeout: float = 2.0) -> list[dict[str, Any]]:
        return IterationResult(self.kv_events, timeout).get_results()

    def aget_kv_events(self, timeout: float = 2.0) -> IterationResult:
        return IterationResult(self.kv_events, timeout)

    @staticmethod
    def create(
        engine: Any = None,
        executor_config: EngineConfig | None = None,
        batched_logits_processor: Any = None,
        model_world_size: int = 1,
        world_size: int = 0,
        mpi_session: Any = None,
        reuse_mpi_comm: bool = False,
        return_logits: bool = False,
        postproc_worker_config: PostprocWorkerConfig | None = None,
        is_llm_executor: bool | None = None,
        *,
        engine_dir: Any = None,
        tokenizer_dir: Any = None,
        num_postprocess_workers: int = 0,
        postprocess_tokenizer_dir: str | None = None,
    ) -> GenerationExecutor:
        """An executor over a checkpoint: its directory, a hub id, or nothing for the default model.

        `world_size` counts processes: 0 and 1 run the engine in this process, 2 in its own process. `engine_dir` is the same as
        `engine`. Without `tokenizer_dir` the checkpoint's own tokenizer is used. `return_logits` says that requests will ask for
        logits, which they may in any case.
        """
        from compat.llm.worker import GenerationExecutorProxy, GenerationExecutorWorker

        refuse("mpi_session", mpi_session, "the ranks of a model are not joined by MPI here")
        refuse("reuse_mpi_comm", reuse_mpi_comm, "the ranks of a model are not joined by MPI here")
        if model_world_size != 1:
            raise NotHere(f"model_world_size is {model_world_size}, this version serves 1; use a smaller model")
        if not 0 <= world_size <= 2:
            raise NotHere(f"world_size is {world_size}, allowed is 0 to 2; 2 gives the engine a process of its own")
        if engine is not None and engine_dir is not None:
            raise ParameterError("engine and engine_dir are both given, and mean the same; leave one of them out")
        postprocess = postproc_worker_config or PostprocWorkerConfig(num_postprocess_workers, postprocess_tokenizer_dir)
        if return_logits and postprocess.enabled:
            raise ParameterError(LOGITS_AND_WORKERS)
        kind = GenerationExecutorProxy if world_size == 2 else GenerationExecutorWorker
        model = engine_dir if engine is None else engine
        return kind.of_model(
            model, executor_config, tokenizer_dir, postprocess, batched_logits_processor=batched_logits_processor
        )

    def __enter__(self) -> GenerationExecutor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def _get_next_client_id(self) -> int:
        with self._id_lock:
            self._last_client_id = (self._last_client_id + 1) % UINT64
            return self._last_client_id


LOGITS_AND_WORKERS = (
    "context and generation logits do not go through post-processing workers, nor do other tensors; set "
    "num_postprocess_workers to 0, or leave them out"
)


def _is_batch(prompts: Any) -> bool:
    """True if these are several prompts, not the token ids of one."""
    if getattr(prompts, "ndim", None) is not None:
        return bool(prompts.ndim > 1)
    return isinstance(prompts, list | tuple) and bool(prompts) and not hasattr(prompts[0], "__index__")


def for_each(name: str, value: Any, count: int) -> list[Any]:
    """One value for each of `count` prompts. Raises ParameterError for a list of another length."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ParameterError(f"{name} has {len(value)} entries, and there are {count} prompts; give one, or as many")
    return list(value)
