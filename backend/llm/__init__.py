"""The Python LLM API: `from backend.llm import LLM, SamplingParams`. Importing it loads no torch."""

from backend.llm.errors import BackgroundError, BatchError, NotHere, ParameterError, RequestError, ResultTimeout
from backend.llm.executor import GenerationExecutor
from backend.llm.llm import LLM
from backend.llm.postprocessing import PostprocWorker, PostprocWorkerConfig
from backend.llm.requests import (
    BatchedLogitsProcessor,
    DisaggregatedParams,
    GenerationRequest,
    LogitsProcessor,
    LoRARequest,
    PromptAdapterRequest,
)
from backend.llm.result import CompletionOutput, GenerationResult, Logprob, RequestOutput
from backend.llm.sampling_params import AdditionalModelOutput, GuidedDecodingParams, SamplingParams
from backend.llm.statistics import IterationResult
from backend.llm.worker import GenerationExecutorProxy, GenerationExecutorWorker

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
    "RequestError",
    "RequestOutput",
    "ResultTimeout",
    "SamplingParams",
]
