"""A GGUF file as a Hugging Face checkpoint: floats under the names, and in the fused or separate projections, of its family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from backend.api.checkpoint.gguf import GgufHeader, TokenId
from backend.architectures.description import ModelConfig
from backend.architectures.gguf.names import as_stored
from backend.models.config import of_object
from backend.models.gguf import GgufTensors, raw_config

# Sets of Llama 3's scaling: (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings). A file holds the
# divisors of frequencies that follow from one of them, not the set.
_LLAMA3 = [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (16.0, 1.0, 4.0, 8192), (40.0, 1.0, 4.0, 8192)]


class GgufCheckpoint(Mapping[str, Tensor]):
    """The tensors of a file by the names of its family's checkpoints. Raises ConfigError."""

    def __init__(self, header: GgufHeader) -> None:
        content = {key: value for key, value in raw_config(header).items() if value is not None}
        self.family = of_object(content)
        self.stored = as_stored(self.family, header)
        self._tensors = GgufTensors(header, self.stored)
        self._fused = dict(self._projections())
        rope = _rope(content["rope_parameters"], self.family)
        padding = header.get("tokenizer.ggml.padding_token_id", TokenId)
        self.config = content | dict(
            pad_token_id=padding, model_type=_model_type(content["architectures"][0]), rope_parameters=rope
        )

    @property
    def has_own_rope(self) -> bool:
        """True if rope_parameters are of a kind that only this server reads."""
        return bool(self.config["rope_parameters"].get("rope_type") == "factors")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._fused:
            return self._tensors[name]
        stored, rows = self._fused[name]
        whole = torch.cat([self._tensors[each] for each in stored])[rows]
        if not self.family.names.layer.qkv_by_head or self.family.names.layer.qkv[0] not in name:
            return whole
        by_head: Tensor = whole.unflatten(0, (3, self.family.num_heads, -1)).transpose(0, 1).flatten(0, 2)
        return by_head

    def __iter__(self) -> Iterator[str]:
        taken = {each for stored, _ in self._fused.values() for each in stored}
        yield from (name for name in self._tensors if name not in taken)
        yield from self._fused

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _projections(self) -> Iterator[tuple[str, tuple[list[str], slice]]]:
        """Each projection that the file fuses otherwise, or in another order: its tensors in the file, and its rows of them."""
        config, names, stored = self.family, self.family.names, self.stored.names.layer
        q, kv, inter = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
            config.intermediate_size,
        )
        groups = ((names.layer.qkv, stored.qkv, (q, kv, kv)), (names.layer.gate_up, stored.gate_up, (inter, inter)))
        for wanted, given, sizes in groups:
            if wanted == given and not (names.layer.qkv_by_head and wanted is names.layer.qkv):
                continue
            ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
            spans = [slice(end - size, end) for end, size in zip(ends, sizes)] if len(wanted) > 1 else [slice(None)]
            for index in range(config.num_layers):
                for suffix in ("weight", "bias"):
                    of_file = [f"{names.layers}{index}.{each}.{suffix}" for each in given]
                    if of_file[0] in self._tensors:
                        for each, span in zip(wanted, spans, strict=True):
                            yield f"{names.layers}{index}.{each}.{suffix}", (of_file, span)


def _model_type(architecture: str) -> str:
    """The key by which transformers finds the family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[str, str] = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    return found[architecture]


def _rope(rope: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Llama 3's scaling by its own name, where the divisors are those of a known set."""
    if rope.get("rope_type") != "factors":
        return rope
    for factor, low, high, original in _LLAMA3:
        expected = [_divisor(2 * math.pi / each, factor, low, high, original) for each in _frequencies(rope, config)]
        if all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(expected, rope["factors"], strict=True)):
            return dict(
                rope_type="llama3",
                rope_theta=rope["rope_theta"],
                factor=factor,
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=original,
            )
    return rope


def _frequencies(rope: dict[str, Any], config: ModelConfig) -> list[float]:
    rotated = config.ropes[0].rotary_dim or config.head_dim
    return [float(rope["rope_theta"] ** (-pair / rotated)) for pair in range(0, rotated, 2)]


def _divisor(wavelength: float, factor: float, low: float, high: float, original: int) -> float:
    """The divisor of a pair's frequency, which backend/layers/rotary.py computes in another way."""
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
