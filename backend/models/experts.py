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


class UnstackedExperts(Mapping[str, Tensor]):
    """stored [experts, n, k], or transposed, with rows of gate and up in turns -> [n, k] of each, gate before up.

    A tensor is read anew for each expert, as a view of a mapped file, so that no more than one expert's numbers are in memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
        """Raises ConfigError for a checkpoint that is quantised otherwise than in MXFP4, or lacks a tensor."""
        names, experts = config.names.layer, config.experts
        stacked, in_blocks = names.stacked, isinstance(config.quantization, Mxfp4Layers)
        assert stacked is not None and experts is not None
        if config.quantization is not None and not in_blocks:
            raise ConfigError(
                f"config.json: a quantised checkpoint of {config.architecture} is not supported; use a float checkpoint with "
                f"--set model.quantization=..."
            )
        self._tensors = tensors
        self._count = experts.count
        self._places: dict[str, _Place] = {}
        parts = []
        named = ((names.expert_gate_up[0], stacked.gate_up), (names.expert_down, stacked.down))
        for (own, stored), interleaved in zip(named, (stacked.is_interleaved, False), strict=True):
            if in_blocks:
                parts += [(f"{own}.{part}", f"{stored}_{part}", False, interleaved) for part in ("blocks", "scales")]
            else:
                parts.append((own + ".weight", stored, stacked.is_transposed, interleaved))
        if experts.has_bias:
            parts += [
                (names.expert_gate_up[0] + ".bias", stacked.gate_up_bias, False, stacked.is_interleaved),
                (names.expert_down + ".bias", stacked.down_bias, False, False),
            ]
        for layer, settings in enumerate(config.layers):
            prefix = f"{config.names.layers}{layer}."
            for own, stored, *form in parts if settings.has_experts else ():
                if prefix + stored not in tensors:
                    raise ConfigError(
                        f"the checkpoint lacks the tensor {shown(prefix + stored)}; its config.json describes another model"
                    )
                for expert in range(experts.count):
                    self._places[f"{prefix}{names.experts}{expert}.{own}"] = _Place(prefix + stored, expert, *form)
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
        return torch.cat((part[::2], part[1::2])) if place.is_interleaved else part

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._tensors if name not in self._stored)
        yield from self._places

    def __len__(self) -> int:
        return len(self._tensors) - len(self._stored) + len(self._places)
