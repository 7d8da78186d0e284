"""TensorRT-LLM's executor bindings over this project's engine. A program writes `from compat import trtllm` in place of

    import tensorrt_llm.bindings.executor as trtllm

Names, arguments, defaults and error texts are those of the bindings. docs/executor.md lists the fields that are honoured, have
no effect or are refused. The older GptManager and its types are in `compat.trtllm.bindings`.
"""

import backend
from compat.trtllm import kv_cache
from compat.trtllm.configs import (
    CacheTransceiverConfig,
    DebugConfig,
    DynamicBatchConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    KvCacheConfig,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    RuntimeDefaults,
    SchedulerConfig,
    SpeculativeDecodingConfig,
)
from compat.trtllm.decoding import DecodingConfig, DecodingMode, GuidedDecodingConfig, LogitsPostProcessorConfig
from compat.trtllm.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    FinishReason,
    KvCacheTransferMode,
    ModelType,
    RequestStage,
    RequestType,
)
from compat.trtllm.executor import Executor
from compat.trtllm.request import Request
from compat.trtllm.request_configs import (
    AdditionalModelOutput,
    ContextPhaseParams,
    EagleConfig,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LookaheadDecodingConfig,
    LoraConfig,
    MropeConfig,
    MultimodalInput,
    OutputConfig,
    PromptTuningConfig,
    SamplingConfig,
)
from compat.trtllm.results import (
    AdditionalOutput,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    SpeculativeDecodingFastLogitsInfo,
    SpeculativeDecodingMetrics,
    TimingMetrics,
)
from compat.trtllm.statistics import (
    DebugTensorsPerIteration,
    DisServingRequestStats,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
)

__version__ = backend.__version__

__all__ = [
    "AdditionalModelOutput",
    "AdditionalOutput",
    "BatchingType",
    "CacheTransceiverConfig",
    "CapacitySchedulerPolicy",
    "CommunicationMode",
    "CommunicationType",
    "ContextChunkingPolicy",
    "ContextPhaseParams",
    "DebugConfig",
    "DebugTensorsPerIteration",
    "DecodingConfig",
    "DecodingMode",
    "DisServingRequestStats",
    "DynamicBatchConfig",
    "EagleConfig",
    "Executor",
    "ExecutorConfig",
    "ExtendedRuntimePerfKnobConfig",
    "ExternalDraftTokensConfig",
    "FinishReason",
    "GuidedDecodingConfig",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "KvCacheTransferMode",
    "LogitsPostProcessorConfig",
    "LookaheadDecodingConfig",
    "LoraConfig",
    "ModelType",
    "MropeConfig",
    "MultimodalInput",
    "OrchestratorConfig",
    "OutputConfig",
    "ParallelConfig",
    "PeftCacheConfig",
    "PromptTuningConfig",
    "Request",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "RuntimeDefaults",
    "SamplingConfig",
    "SchedulerConfig",
    "SpecDecodingStats",
    "SpeculativeDecodingConfig",
    "SpeculativeDecodingFastLogitsInfo",
    "SpeculativeDecodingMetrics",
    "StaticBatchingStats",
    "TimingMetrics",
    "__version__",
    "kv_cache",
]
