"""Maps an architecture's name to the function that builds the model from checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backend.models.config import ModelConfig
from backend.models.linears import LinearOptions
from backend.models.llama import Llama, build_llama

Build = Callable[[ModelConfig, Mapping[str, Tensor], int, torch.dtype, torch.device, LinearOptions], Llama]

FAMILIES: dict[str, Build] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_llama,
    "Qwen2ForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_llama,
}
