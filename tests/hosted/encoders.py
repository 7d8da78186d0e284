"""Tiny random encoders, with the vectors that transformers makes of texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from backend.architectures.hosted import ENCODERS
from tests.hosted.tiny import tiny_config

OWN: dict[str, dict[str, Any]] = {  # what a model type needs besides
    "modernbert": {"local_attention": 12, "global_attn_every_n_layers": 2},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "albert": {"embedding_size": 48},
    "electra": {"embedding_size": 48},
    "gte": {"num_key_value_heads": 4},
    "eurobert": {"num_key_value_heads": 2},
}


def tiny_encoder(architecture: str, seed: int = 0, **given: Any) -> PreTrainedModel:
    """With weights that make every part matter, and a pooling layer or a head that no embedding needs."""
    torch.manual_seed(seed)
    kind = ENCODERS[architecture].model_type
    config = tiny_config(kind, **{**OWN.get(kind, {}), **given})
    config._attn_implementation = "eager"
    has_head = architecture.endswith("ForMaskedLM")
    mapping = transformers.MODEL_FOR_MASKED_LM_MAPPING if has_head else transformers.MODEL_MAPPING
    model = mapping[type(config)](config)
    for name, parameter in model.named_parameters():
        spread = 1.0 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.2
        offset = 1.0 if parameter.dim() == 1 and "norm" in name.lower() and name.endswith("weight") else 0.0
        parameter.data.normal_(0, spread).add_(offset)
    return model.eval()


def save_encoder(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def hidden_states(model: PreTrainedModel, texts: list[list[int]]) -> list[Tensor]:
    """Of all tokens of each text, computed together: padded on the right, under an attention mask."""
    pad = model.config.pad_token_id or 0
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    with torch.inference_mode():
        out = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    return [rows[: len(text)] for rows, text in zip(out, texts)]
