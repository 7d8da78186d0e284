"""Small models of every family, with what folds must respect: GQA, biases, norms of q and k, a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.models.loader import load_directory
from benchmarks.quality.perplexity import row_logits
from tools.make_random_model import make_random_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama3": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": dict(attention_bias=True),
}
# widths that every scheme takes
WIDE = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32, intermediate_size=256)


def logits_of(directory: Path, rows: Tensor) -> Tensor:
    """rows [rows, length] -> [rows, length, vocab], computed in float32."""
    return row_logits(load_directory(directory, None, "float32", torch.device("cpu")), rows)


def random_rows(vocab_size: int = 131, shape: tuple[int, int] = (3, 40)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(5).integers(0, vocab_size, shape))


def with_outliers(directory: Path, family: str, **overrides: Any) -> Path:
    """A model with a few channels that are much larger than the others, as those of real models are."""
    make_random_model(directory, family, **overrides)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("layernorm.weight"):
            tensor[3], tensor[17] = 20, -15
        if name.endswith(("k_proj.weight", "up_proj.weight")):
            tensor[5] *= 12
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


# The names of a layer's tensors in the families above.
Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
GATE, UP, DOWN = (f"mlp.{name}_proj" for name in ("gate", "up", "down"))
INPUT_NORM, POST_NORM = "input_layernorm", "post_attention_layernorm"
