"""The name under which programs import TensorRT-LLM's older bindings: all of them are in compat/trtllm."""

from compat.trtllm.bindings import *  # noqa: F403
