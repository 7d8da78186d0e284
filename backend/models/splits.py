"""Checkpoints that store several projections in one tensor, in groups of rows (Split): presented as a tensor of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from backend.api.errors import ConfigError
from backend.architectures.description import ModelConfig, Split


class _Part(NamedTuple):
    stored: str  # name of the tensor
    split: Split
    first: int  # its first row within a group
    rows: int  # of it in a group


class SplitTensors(Mapping[str, Tensor]):
    """stored a0 b0 a1 b1, of two groups and the parts a and b -> a0 a1 and b0 b1

    All tensors of a projection are split, its bias and the scales of a quantised one too, as long as they have its rows.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> None:
        self._tensors = tensors
        self._parts: dict[str, _Part] = {}
        self._stored: set[str] = set()
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
                self._parts[own] = _Part(name, split, first, rows)
                first += rows

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._tensors[name]
        tensor, group = self._tensors[part.stored], sum(rows for _, rows in part.split.parts)
        if not tensor.dim() or len(tensor) != part.split.groups * group:
            raise ConfigError(
                f"tensor {part.stored} has shape {list(tensor.shape)}, config.json asks for {part.split.groups * group} rows; "
                f"use a checkpoint of the same model, quantised by rows or not at all"
            )
        rows: Tensor = tensor.unflatten(0, (part.split.groups, group))[:, part.first : part.first + part.rows]
        return rows.flatten(0, 1)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._tensors if name not in self._stored)
        yield from self._parts

    def __len__(self) -> int:
        return len(self._tensors) - len(self._stored) + len(self._parts)
