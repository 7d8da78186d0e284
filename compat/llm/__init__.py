"""The Python LLM API: `from compat.llm import LLM, SamplingParams`. Importing it loads no torch."""

from compat.llm.errors import BackgroundError, BatchError, NotHere, ParameterError, RequestError, ResultTimeout
from compat.llm.executor import GenerationExecutor
from compat.llm.llm import LLM
from compat.llm.postprocessing import PostprocWorker, PostprocWorkerConfig
from compat.llm.ray_executor import RayExecutor
from compat.llm.requests import (
    BatchedLogitsProcessor,
    DisaggregatedParams,
    GenerationRequest,
    LogitsProcessor,
    LoRARequest,
    PromptAdapterRequest,
)
from compat.llm.result import CompletionOutput, GenerationResult, Logprob, RequestOutput
from compat.llm.sampling_params import AdditionalModelOutput, GuidedDecodingParams, SamplingParams
from compat.llm.statistics import IterationResult
from compat.llm.worker import GenerationExecutorProxy, GenerationExecutorWorker

__all__ = [
    "LLM",
    "AdditionalModelOutput",
    "BackgroundError",
    "BatchError",
    "BatchedLogitsProcessor",
    "CompletionOutput",
    "DisaggregatedParams",
    "GenerationExecutor",
    "GenerationExecutorProxy",
    "GenerationExecutorWorker",
    "GenerationRequest",
    "GenerationResult",
    "GuidedDecodingParams",
    "IterationResult",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "NotHere",
    "ParameterError",
    "PostprocWorker",
    "PostprocWorkerConfig",
    "PromptAdapterRequest",
    "RayExecutor",
    "RequestError",
    "RequestOutput",
    "ResultTimeout",
    "SamplingParams",
]
