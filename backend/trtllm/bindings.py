"""The older part of TensorRT-LLM's bindings: `from backend.trtllm import bindings` in place of `import tensorrt_llm.bindings`.

GptManager runs requests of named tensors, and answers through callbacks. New programs use `backend.trtllm.Executor`.
"""

import backend
from backend import trtllm as executor
from backend.trtllm import tensor_names
from backend.trtllm.gpt_configs import (
    KvCacheConfig,
    PeftCacheManagerConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from backend.trtllm.gpt_manager import GptManager
from backend.trtllm.inference_request import InferenceRequest, NamedTensor
from backend.trtllm.memory_counters import MemoryCounters

binding_type = "pybind"  # what programs ask for when they tell TensorRT-LLM's two kinds of bindings apart

__version__ = backend.__version__

__all__ = [
    "GptManager",
    "InferenceRequest",
    "KvCacheConfig",
    "MemoryCounters",
    "NamedTensor",
    "PeftCacheManagerConfig",
    "TrtGptModelOptionalParams",
    "TrtGptModelType",
    "__version__",
    "binding_type",
    "executor",
    "tensor_names",
]
