"""The older part of TensorRT-LLM's bindings: `from compat.trtllm import bindings` in place of `import tensorrt_llm.bindings`.

GptManager takes requests of named tensors and answers through callbacks. New programs use `compat.trtllm.Executor`.
"""

import backend
from compat import trtllm as executor
from compat.trtllm import tensor_names
from compat.trtllm.gpt_configs import (
    KvCacheConfig,
    PeftCacheManagerConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from compat.trtllm.gpt_manager import GptManager, MemoryCounters
from compat.trtllm.inference_request import InferenceRequest, NamedTensor

binding_type = "pybind"  # programs read it to distinguish TensorRT-LLM's two kinds of bindings

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
