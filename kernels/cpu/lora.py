"""PackedAdapter: a LoRA adapter in the form that native/lora.h reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.common.adapter import LINEARS, MAX_PARTS, Layer, Part
from kernels.cpu.structs import PANEL, LoraLayerStruct, LoraPartStruct

K_UNIT = 64  # LORA_K_UNIT of native/lora.h
Hold = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # A and B of a part -> where they lie from then on


class PackedAdapter:
    def __init__(self, layers: Sequence[Layer], dtype: torch.dtype, hold: Hold = lambda a, b: (a, b)) -> None:
        """`layers`: those of the whole model, in order. dtype: the one that the model computes in."""
        self._held: list[Tensor] = []  # keeps alive the memory that the structures point to
        self._dtype, self._hold = dtype, hold
        self.max_rank = max((part.rank for layer in layers for parts in layer.values() for part in parts), default=0)
        self.structs = (LoraLayerStruct * len(layers))(*map(self._layer, layers))

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held)

    def _layer(self, layer: Layer) -> LoraLayerStruct:
        linears: list[Any] = []
        for name in LINEARS:
            parts = [self._part(part) for part in layer.get(name, ())]
            linears.append((LoraPartStruct * MAX_PARTS)(*parts))
        return LoraLayerStruct(*linears)

    def _part(self, part: Part) -> LoraPartStruct:
        a, b = self._hold(pack_a(part.a.to(self._dtype)), pack_b(part.b.to(self._dtype), part.first))
        self._held += [a, b]
        return LoraPartStruct(a.data_ptr(), b.data_ptr(), part.first, len(part.b), part.rank, part.scale)


def packed_bytes(first: int, n: int, k: int, rank: int, itemsize: int) -> int:
    """Size of a part as `pack_a` and `pack_b` pack it."""
    panels = -(-(first % PANEL + n) // PANEL)
    return rank * (k + -k % K_UNIT + panels * PANEL) * itemsize


def pack_a(a: Tensor) -> Tensor:
    """a [rank, k] with zeros behind each row, up to a multiple of K_UNIT."""
    return torch.nn.functional.pad(a, (0, -a.shape[1] % K_UNIT)).contiguous()


def pack_b(b: Tensor, first: int) -> Tensor:
    """b [n, rank] -> [panels, rank, PANEL], whose first panel is the one that column `first` of the layer lies in."""
    before = first % PANEL
    padded = torch.nn.functional.pad(b, (0, 0, before, -(before + len(b)) % PANEL))
    return padded.view(-1, PANEL, b.shape[1]).transpose(1, 2).contiguous()
