"""GenerationRequest, and the values that name adapters and describe disaggregated serving."""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend.api.images import ImageInput
from compat.llm.errors import ParameterError
from compat.llm.sampling_params import SamplingParams

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(frozen=True)
class LoRARequest:
    """Names an adapter. The path is read when the adapter is first used."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True)
class PromptAdapterRequest:
    """Names a prompt adapter (a soft prompt)."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str = ""

    @property
    def adapter_id(self) -> int:
        return self.prompt_adapter_id

    @property
    def name(self) -> str:
        return self.prompt_adapter_name

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path


@dataclass(kw_only=True)
class DisaggregatedParams:
    """One half of a request whose prompt and output are computed by different servers."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None and self.request_type not in REQUEST_TYPES:
            raise ParameterError(f"request_type is {self.request_type!r}, allowed are {', '.join(REQUEST_TYPES)}")


class LogitsProcessor(ABC):
    """Changes the logits of one request in place, before a token is chosen."""

    @abstractmethod
    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None: ...


class BatchedLogitsProcessor(ABC):
    """Changes the logits of all requests of an iteration that asked for it, in place."""

    @abstractmethod
    def __call__(
        self,
        req_ids: list[int],
        logits: list[Any],
        token_ids: list[list[list[int]]],
        stream_ptr: int,
        client_ids: list[int | None],
    ) -> None: ...


class GenerationRequest:
    """One prompt with its parameters. Its `id` is the client id, which the executor sets once."""

    def __init__(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams,
        query_token_ids: Any = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        streaming: bool = False,
        multimodal_params: Mapping[str, Any] | None = None,
        kv_cache_retention_config: Any = None,
        disaggregated_params: DisaggregatedParams | None = None,
        postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
        priority: float | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Token ids may be lists, numpy arrays or torch tensors of one dimension. `arrival_time`: monotonic seconds, else now."""
        self.prompt_token_ids = token_ids("prompt_token_ids", prompt_token_ids)
        self.query_token_ids = None if query_token_ids is None else token_ids("query_token_ids", query_token_ids)
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params is a {type(sampling_params).__name__}, SamplingParams are needed")
        self.sampling_params = sampling_params
        self.lora_request = lora_request
        self.prompt_adapter_request = prompt_adapter_request
        self.streaming = streaming
        self.multimodal_params = multimodal_params
        self.images: tuple[ImageInput, ...] = ()  # once they are in the prompt (images.py)
        self.kv_cache_retention_config = kv_cache_retention_config
        self.disaggregated_params = disaggregated_params
        self.postproc_params = postproc_params
        self.scheduling_params = scheduling_params
        self.cache_salt = cache_salt
        self.priority = priority
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self._id: int | None = None

    @property
    def id(self) -> int | None:
        """None until the request has been submitted."""
        return self._id

    def set_id(self, client_id: int) -> GenerationRequest:
        """Raises ValueError the second time: a request is submitted once."""
        if self._id is not None:
            raise ParameterError(f"the request already has the id {self._id}; make a new request to submit it again")
        self._id = client_id
        return self

    @property
    def max_tokens(self) -> int | None:
        return self.sampling_params.max_tokens

    @property
    def all_token_ids(self) -> list[int]:
        """The prompt that the engine gets: the context, then the query."""
        return self.prompt_token_ids + (self.query_token_ids or [])


def token_ids(name: str, ids: Any) -> list[int]:
    """A list of whole numbers. Raises TypeError for anything else."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(listed, list | tuple):
        raise TypeError(f"{name} is a {type(ids).__name__}, a list of token ids is needed")
    try:
        return [operator.index(token_id) for token_id in listed]
    except TypeError:
        raise TypeError(f"{name} holds something else than whole numbers; give one list of token ids") from None
