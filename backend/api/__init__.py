"""Frozen values that clients and processes exchange. Pure: standard library and msgspec only."""

from backend.api.config.file import load_config
from backend.api.config.schema import EngineConfig
from backend.api.errors import (
    ConfigError,
    EngineUnavailable,
    ErrorCode,
    EverbatchError,
    InvalidRequest,
    Overloaded,
    SessionError,
    SessionStatus,
    Unsupported,
    session_status,
)
from backend.api.outputs import AdditionalOutput, OutputConfig
from backend.api.request import Request, RequestId, SessionConfig, SessionId
from backend.api.response import FinishReason, PerfMetrics, PromptLogProb, Response, Result, TopLogProb
from backend.api.sampling import SamplingConfig
from backend.api.stats import EngineCounters, EngineStats, IterationStats, KvCacheStats
from backend.api.tensor import TensorData

__all__ = [
    "AdditionalOutput",
    "ConfigError",
    "EngineConfig",
    "EngineCounters",
    "EngineStats",
    "EngineUnavailable",
    "ErrorCode",
    "EverbatchError",
    "FinishReason",
    "InvalidRequest",
    "IterationStats",
    "KvCacheStats",
    "OutputConfig",
    "Overloaded",
    "PerfMetrics",
    "PromptLogProb",
    "Request",
    "RequestId",
    "Response",
    "Result",
    "SamplingConfig",
    "SessionConfig",
    "SessionError",
    "SessionId",
    "SessionStatus",
    "TensorData",
    "TopLogProb",
    "Unsupported",
    "load_config",
    "session_status",
]
