"""Checkpoints in compressed-tensors' published layout, made by hand from random float ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.make_random_model import make_random_model

WEIGHTS: dict[str, Any] = dict(
    num_bits=8,
    type="int",
    symmetric=True,
    strategy="channel",
    group_size=None,
    dynamic=False,
    actorder=None,
    block_structure=None,
    observer="minmax",
    observer_kwargs={},
)
ACTIVATIONS: dict[str, Any] = WEIGHTS | dict(strategy="token", dynamic=True, observer=None)
# 5 heads of 20, 90 columns in the MLP: no multiples of a group, of four, or of each other.
ODD = dict(hidden_size=60, num_attention_heads=5, num_key_value_heads=1, head_dim=20, intermediate_size=90)


def quantization_config(format: str = "int-quantized", **changes: Any) -> dict[str, Any]:
    """The section as llm-compressor writes it; `changes` go to the group's members, or to the section's own keys."""
    group = dict(targets=["Linear"], weights=WEIGHTS, input_activations=None, output_activations=None)
    section = dict(
        quant_method="compressed-tensors",
        format=format,
        config_groups={"group_0": group},
        ignore=["lm_head"],
        kv_cache_scheme=None,
        quantization_status="compressed",
        global_compression_ratio=1.5,
    )
    for key, value in changes.items():
        (group if key in group else section)[key] = value
    return section


def minmax(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """The library's observer: scale = max |w| / 127.5, q from -128 to 127. w [n, k] -> (int8 [n, k], bfloat16 scales)."""
    q, scales = [], []
    for part in w.split(group, dim=1):
        scale = (part.abs().amax(1, keepdim=True) / 127.5).bfloat16()
        q.append((part / scale.float()).round().clamp(-128, 127))
        scales.append(scale)
    return torch.cat(q, 1).to(torch.int8), torch.cat(scales, 1)


def pack(q: Tensor) -> Tensor:
    """int8 [n, k] -> int32 [n, ceil(k / 4)], as pack_to_int32 does it: unsigned, the first column lowest."""
    n, k = q.shape
    unsigned = torch.zeros(n, -(-k // 4) * 4, dtype=torch.int64)
    unsigned[:, :k] = q.long() + 128
    words = sum(unsigned[:, byte::4] << (8 * byte) for byte in range(4))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def write_pair(root: Path, family: str, section: dict[str, Any], **overrides: Any) -> tuple[Path, Path]:
    """Returns (int8 checkpoint, a float32 checkpoint of the values that the int8 one stands for)."""
    floats = make_random_model(root / "float", family, **overrides)
    weights = load_file(floats / "model.safetensors")
    scheme = section["config_groups"]["group_0"]["weights"]
    stored: dict[str, Tensor] = {}
    for name, tensor in list(weights.items()):
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        group = scheme["group_size"] or tensor.shape[1]
        q, scale = minmax(tensor, group)
        weights[name] = q.float() * scale.float().repeat_interleave(group, 1)[:, : q.shape[1]]
        stored[name + "_scale"] = scale
        if section["format"] == "pack-quantized":
            stored |= {name + "_packed": pack(q), name + "_shape": torch.tensor(q.shape)}
        else:
            stored[name] = q
    assert any((tensor == -128).any() for tensor in stored.values() if tensor.dtype == torch.int8) or any(
        name.endswith("_packed") for name in stored
    )
    save_file(weights, floats / "model.safetensors", {"format": "pt"})
    quantised = root / "int8"
    quantised.mkdir()
    save_file(stored, quantised / "model.safetensors", {"format": "pt"})
    write_config(quantised, json.loads((floats / "config.json").read_text()) | {"quantization_config": section})
    return quantised, floats


def write_config(directory: Path, raw: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(raw))
