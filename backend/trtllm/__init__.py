"""The name under which programs import TensorRT-LLM's executor bindings: all of them are in compat/trtllm."""

from compat.trtllm import *  # noqa: F403
