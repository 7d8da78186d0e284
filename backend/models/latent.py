"""Checkpoints of models with latent attention: the projection from the latent to keys and values, presented as two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backend.architectures.description import ModelConfig
from backend.layers.linear import floats_of
from backend.models.tensors import TensorSource

_WEIGHT = ".weight"


class _Part(NamedTuple):
    stored: str  # name of the projection to keys and values
    is_keys: bool


class AbsorbedTensors(Mapping[str, Tensor]):
    """stored [heads * (plain + value_dim), rank] -> keys [heads * rank, plain], transposed head by head, and values
    [heads * value_dim, rank]

    A quantised projection becomes floats, because its scales would be of other columns. A checkpoint that has the two already
    stays as it is.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
        assert config.latent is not None
        self._tensors, self._config = tensors, config
        self._quantised = config.quantization
        names = config.names.layer.latent
        self._parts: dict[str, _Part] = {}
        self._stored: set[str] = set()
        layers = [f"{config.names.layers}{layer}." for layer in range(config.num_layers if names.up else 0)]
        prefix_of = {prefix + names.up: prefix for prefix in layers}
        for name in tensors:
            stored = name.rpartition(".")[0]
            if (prefix := prefix_of.get(stored)) is not None:
                self._stored.add(name)
                self._parts[prefix + names.keys + _WEIGHT] = _Part(stored, True)
                self._parts[prefix + names.values + _WEIGHT] = _Part(stored, False)

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._tensors[name]
        latent, heads = self._config.latent, self._config.num_heads
        assert latent is not None
        rows = heads * (latent.plain + latent.value_dim)
        by_head = self._floats(part.stored, rows, latent.rank).unflatten(0, (heads, -1))
        plain = latent.plain
        own: Tensor = by_head[:, :plain].transpose(1, 2) if part.is_keys else by_head[:, plain:]
        return own.flatten(0, 1).contiguous()

    def _floats(self, name: str, rows: int, columns: int) -> Tensor:
        """Raises ConfigError for a tensor that is missing, or of another shape."""
        source = TensorSource(self._tensors, torch.float32, torch.device("cpu"))
        if self._quantised is None or not source.has(name + self._quantised.marker):
            return source.take_raw(name + _WEIGHT, (rows, columns))
        return floats_of(self._quantised.take(source, name, rows, columns))

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._tensors if name not in self._stored)
        yield from self._parts

    def __len__(self) -> int:
        return len(self._tensors) - len(self._stored) + len(self._parts)
