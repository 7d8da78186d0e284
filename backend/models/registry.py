"""Maps an architecture's name to the function that builds the model from checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.models.decoder import Decoder, build_decoder
from backend.models.linears import LinearOptions

Build = Callable[[ModelConfig, Mapping[str, Tensor], int, torch.dtype, torch.device, LinearOptions], Decoder]

FAMILIES: dict[str, Build] = {
    "LlamaForCausalLM": build_decoder,
    "MistralForCausalLM": build_decoder,
    "Qwen2ForCausalLM": build_decoder,
    "Qwen3ForCausalLM": build_decoder,
}
