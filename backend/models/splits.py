"""Checkpoints that store several projections in one tensor, in groups of rows (Split): presented as a tensor of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig
from backend.architectures.recurrent_names import Split
from backend.models.awq import AwqLayers
from backend.models.gptq import GptqLayers
from backend.models.qoq import QoqLayers


class _Form(NamedTuple):
    """How a tensor of a projection holds its rows."""

    axis: int = 0
    rows: int = 1  # in one number


_PLAIN = _Form()
_BESIDE = _Form(1)
_PACKED_BESIDE = _Form(1, 8)
# Tensors that are otherwise than rows one below the other, by their kind.
_AWQ = {"qweight": _PACKED_BESIDE, "qzeros": _PACKED_BESIDE, "scales": _BESIDE}
_GPTQ = {"qweight": _BESIDE, "qzeros": _PACKED_BESIDE, "scales": _BESIDE}
_COMPRESSED = {"weight_zero_point": _Form(0, 8)}
_SHARED = ("g_idx",)  # all parts have the same
_SHAPE = "weight_shape"  # [rows, columns]


class _Part(NamedTuple):
    stored: str  # name of the tensor
    kind: str  # the end of that name
    split: Split
    first: int  # its first row within a group
    rows: int  # how many it has in a group


class SplitTensors(Mapping[str, Tensor]):
    """stored a0 b0 a1 b1, of two groups and the parts a and b -> a0 a1 and b0 b1

    All tensors of a projection are split, its bias and the scales and zero points of a quantised one too.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
        """Raises ConfigError for a format whose rows are not apart."""
        self._tensors = tensors
        self._parts: dict[str, _Part] = {}
        self._stored: set[str] = set()
        quantised = config.quantization
        if isinstance(quantised, QoqLayers):
            raise ConfigError(
                f"config.json: a checkpoint of {config.architecture} in QServe's format is not supported; use one in the format "
                f"of AWQ, GPTQ or compressed-tensors, or a float checkpoint"
            )
        kinds = ((AwqLayers, _AWQ), (GptqLayers, _GPTQ))
        self._forms = next((forms for kind, forms in kinds if isinstance(quantised, kind)), _COMPRESSED)
        by_name = {split.stored: split for split in config.names.layer.splits}
        for name in tensors:
            stored, _, kind = name.rpartition(".")
            layer = stored.removeprefix(config.names.layers).partition(".")[2]
            if not stored.startswith(config.names.layers) or layer not in by_name:
                continue
            split, first = by_name[layer], 0
            self._stored.add(name)
            for part, rows in split.parts:
                own = f"{stored.removesuffix(layer)}{part}.{kind}"
                self._parts[own] = _Part(name, kind, split, first, rows)
                first += rows

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._tensors[name]
        tensor, split = self._tensors[part.stored], part.split
        if part.kind in _SHARED:
            return tensor
        if part.kind == _SHAPE:
            return torch.tensor([split.groups * part.rows, *tensor.tolist()[1:]])
        axis, packed = self._forms.get(part.kind, _PLAIN)
        group = sum(rows for _, rows in split.parts)
        if tensor.dim() <= axis or tensor.shape[axis] * packed != split.groups * group:
            raise ConfigError(
                f"tensor {part.stored} has shape {list(tensor.shape)}, config.json asks for {split.groups * group} rows; "
                f"use a checkpoint of the same model, quantised by rows or not at all"
            )
        if group % packed or part.first % packed or part.rows % packed:
            raise ConfigError(
                f"tensor {part.stored} holds {packed} rows in a number, and its parts have other borders; use a checkpoint that "
                f"leaves this layer as floats"
            )
        first, count = part.first // packed, part.rows // packed
        groups = tensor.unflatten(axis, (split.groups, group // packed)).narrow(axis + 1, first, count)
        rows: Tensor = groups.flatten(axis, axis + 1)
        return rows

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._tensors if name not in self._stored)
        yield from self._parts

    def __len__(self) -> int:
        return len(self._tensors) - len(self._stored) + len(self._parts)
