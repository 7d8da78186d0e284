"""Files of LoRA adapters, without PEFT and without a model that they fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PLACES = {"lm_head": "lm_head"}  # all others are in a layer


def write_adapter(directory: Path, rank: int = 4, module: str = "q_proj", size: int = 16, **config: object) -> Path:
    """One projection of layer 0, or the output head, with `size` inputs and outputs."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8} | config)
    )
    name = f"base_model.model.{PLACES.get(module, f'model.layers.0.self_attn.{module}')}"
    tensors = {"A": np.ones((rank, size), np.float32), "B": np.ones((size, rank), np.float32)}
    halves = {f"{name}.lora_{half}.weight": tensor for half, tensor in tensors.items()}
    save_file(halves, directory / "adapter_model.safetensors")
    return directory
