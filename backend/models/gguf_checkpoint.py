"""A GGUF file as a Hugging Face checkpoint: floats under the names, and in the fused or separate projections, of its family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from backend.api.checkpoint.gguf import GgufHeader, TokenId
from backend.architectures.description import ModelConfig, RopeConfig
from backend.architectures.gguf.names import as_stored
from backend.layers.rotary import inverse_frequencies
from backend.models.config import of_object
from backend.models.gguf import GgufTensors, raw_config

# The scalings of published models of Llama 3.1 and after. A file holds the divisors of frequencies that follow from one of them,
# and not its numbers.
_LLAMA3: list[dict[str, Any]] = [
    dict(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    for factor in (8.0, 16.0, 32.0, 40.0)
]


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
    plain = inverse_frequencies(RopeConfig(rope["rope_theta"]), config.head_dim)
    for known in _LLAMA3:
        divisors = plain / inverse_frequencies(RopeConfig(rope["rope_theta"], "llama3", **known), config.head_dim)
        if torch.allclose(divisors, torch.tensor(rope["factors"]), rtol=1e-5):
            scaling = {key.replace("max_position", "max_position_embeddings"): value for key, value in known.items()}
            return dict(rope_type="llama3", rope_theta=rope["rope_theta"], **scaling)
    return rope
