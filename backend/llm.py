"""The name under which programs import TensorRT-LLM's LLM API: all of it is in compat/llm."""

from compat.llm import *  # noqa: F403
