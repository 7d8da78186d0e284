"""Checkpoints that hold the experts of a layer in one tensor: presented as one tensor for each expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backend.api.checkpoint.model_files import shown
from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.models.mxfp4 import Mxfp4Layers


class _Place(NamedTuple):
    """Where an expert's tensor comes from."""

    tensor: str
    expert: int
    is_transposed: bool
    is_interleaved: bool
    half: int | None = None  # 0: the first half of its rows, 1: the second; None: all


class _Part(NamedTuple):
    """A tensor of each expert, and the tensor of all experts that holds it."""

    own: str  # behind the expert's number
    stored: str  # behind the layer's prefix
    is_transposed: bool = False
    is_interleaved: bool = False
    half: int | None = None


def _parts(config: ModelConfig, in_blocks: bool) -> Iterator[_Part]:
    """Gate and up are in one tensor, and those of an expert either as well or, in families with both forms, apart."""
    names, experts = config.names.layer, config.experts
    stacked, of_up, down = names.stacked, names.expert_gate_up, names.expert_down
    assert stacked is not None and experts is not None
    interleaved = stacked.is_interleaved
    if in_blocks:
        for part in ("blocks", "scales"):
            yield _Part(f"{of_up[0]}.{part}", f"{stacked.gate_up}_{part}", is_interleaved=interleaved)
            yield _Part(f"{down}.{part}", f"{stacked.down}_{part}")
    else:
        for index, own in enumerate(of_up):
            half = index if len(of_up) > 1 else None
            yield _Part(own + ".weight", stacked.gate_up, stacked.is_transposed, interleaved, half)
        yield _Part(down + ".weight", stacked.down, stacked.is_transposed)
    if experts.has_bias:
        yield _Part(of_up[0] + ".bias", stacked.gate_up_bias, is_interleaved=interleaved)
        yield _Part(down + ".bias", stacked.down_bias)


class UnstackedExperts(Mapping[str, Tensor]):
    """stored [experts, n, k], or transposed, with rows of gate and up in turns -> [n, k] of each, gate before up.

    A tensor is read anew for each expert, as a view of a mapped file, so that no more than one expert's numbers are in memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
        """Raises ConfigError for a checkpoint that is quantised otherwise than in MXFP4, or lacks a tensor."""
        names, experts, in_blocks = config.names.layer, config.experts, isinstance(config.quantization, Mxfp4Layers)
        stacked = names.stacked
        assert stacked is not None and experts is not None
        self._tensors, self._count = tensors, experts.count
        self._places: dict[str, _Place] = {}
        layers = [f"{config.names.layers}{layer}." for layer, each in enumerate(config.layers) if each.has_experts]
        if stacked.is_optional:
            layers = [prefix for prefix in layers if prefix + stacked.gate_up in tensors]
        if layers and config.quantization is not None and not in_blocks:
            raise ConfigError(
                f"config.json: a quantised checkpoint of {config.architecture} whose experts are in one tensor is not supported; "
                f"use a float checkpoint with --set model.quantization=..."
            )
        parts = list(_parts(config, in_blocks))
        for prefix in layers:
            for part in parts:
                stored = prefix + part.stored
                if stored not in tensors:
                    raise ConfigError(
                        f"the checkpoint lacks the tensor {shown(stored)}; its config.json describes another model"
                    )
                for expert in range(experts.count):
                    own = f"{prefix}{names.experts}{expert}.{part.own}"
                    self._places[own] = _Place(stored, expert, part.is_transposed, part.is_interleaved, part.half)
        self._stored = {place.tensor for place in self._places.values()}

    def __getitem__(self, name: str) -> Tensor:
        if (place := self._places.get(name)) is None:
            return self._tensors[name]
        stacked = self._tensors[place.tensor]
        if not stacked.dim() or len(stacked) != self._count:
            raise ConfigError(
                f"tensor {place.tensor} has shape {list(stacked.shape)}, config.json says that there are {self._count} experts; "
                f"they are of different models"
            )
        part = stacked[place.expert]
        if place.is_transposed and part.dim() == 2:
            part = part.T
        if place.half is not None and part.dim():
            return part[: len(part) // 2] if place.half == 0 else part[len(part) // 2 :]
        return torch.cat((part[::2], part[1::2])) if place.is_interleaved else part

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._tensors if name not in self._stored)
        yield from self._places

    def __len__(self) -> int:
        return len(self._tensors) - len(self._stored) + len(self._places)
