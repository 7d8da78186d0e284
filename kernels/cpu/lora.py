"""PackedAdapter: a LoRA adapter in the form that native/lora.h reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, Array
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.common.adapter import LINEARS, MAX_PARTS, Layer, Part
from kernels.cpu.structs import PANEL, LoraLayerStruct, LoraPartStruct

K_UNIT = 64  # LORA_K_UNIT of native/lora.h
PartStructs = Array[LoraPartStruct]  # MAX_PARTS of them: what an adapter has for a linear layer
Hold = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # A and B of a part -> where they lie from then on


class PackedAdapter:
    def __init__(self, layers: Sequence[Layer], dtype: torch.dtype, hold: Hold = lambda a, b: (a, b)) -> None:
        """`layers`: those of the whole model, in order. dtype: the one that the model computes in."""
        self._held: list[Tensor] = []  # keeps alive the memory that the structures point to
        self.dtype, self._hold = dtype, hold
        self.max_rank = max((part.rank for layer in layers for parts in layer.values() for part in parts), default=0)
        # One for each layer, by the names of linear layers.
        self.linears = [{name: self._linear(parts) for name, parts in layer.items()} for layer in layers]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held)

    @cached_property
    def structs(self) -> Array[LoraLayerStruct]:
        """The layers of a model whose linear layers are LINEARS."""
        layers = [LoraLayerStruct(*(layer.get(name, _NOTHING) for name in LINEARS)) for layer in self.linears]
        return (LoraLayerStruct * len(layers))(*layers)

    def _linear(self, parts: Sequence[Part]) -> PartStructs:
        return (LoraPartStruct * MAX_PARTS)(*map(self._part, parts))

    def _part(self, part: Part) -> LoraPartStruct:
        a, b = self._hold(pack_a(part.a.to(self.dtype)), pack_b(part.b.to(self.dtype), part.first))
        self._held += [a, b]
        return LoraPartStruct(a.data_ptr(), b.data_ptr(), part.first, len(part.b), part.rank, part.scale)


class TokenAdapters:
    """The adapters of a flat batch's tokens, for linear layers that are computed one by one."""

    def __init__(
        self, library: CDLL, of_rows: Sequence[PackedAdapter | None], num_tokens: Sequence[int], threads: int
    ) -> None:
        """of_rows: each row's adapter; num_tokens: of each row."""
        self._library, self._threads = library, threads
        self._adapters = list({id(each): each for each in of_rows if each is not None}.values())
        self._num_tokens = sum(num_tokens)
        index = {id(each): at for at, each in enumerate(self._adapters)}
        of_tokens = np.repeat([-1 if each is None else index[id(each)] for each in of_rows], num_tokens)
        (tokens,) = (of_tokens >= 0).nonzero()
        self._tokens = torch.from_numpy(tokens)
        self._adapter_of: NDArray[np.int32] = of_tokens[tokens].astype(np.int32)

    def add(self, layer: int, y: Tensor, x: Tensor, linear: str) -> None:
        """y [tokens, n] += the adapters' part for x [tokens, k], which is rounded to the model's dtype.

        A token's result has the same bits whatever tokens are beside it. Sums are float32.
        """
        assert len(x) == len(y) == self._num_tokens, f"{len(x)} rows for {self._num_tokens} tokens"
        found = [adapter.linears[layer].get(linear) for adapter in self._adapters]
        if not any(found):
            return
        linears = (LoraPartStruct * MAX_PARTS * len(found))(*(each or _NOTHING for each in found))
        inputs, sums = x.index_select(0, self._tokens).float(), y.index_select(0, self._tokens).float()
        self._library.everbatch_lora(
            linears,
            len(found),
            self._adapter_of.ctypes.data,
            max(adapter.max_rank for adapter in self._adapters),
            inputs.data_ptr(),
            *inputs.shape,
            sums.shape[1],
            self._adapters[0].dtype.itemsize,  # some routers have inputs of another type than the model
            sums.data_ptr(),
            self._threads,
        )
        y.index_copy_(0, self._tokens, sums.to(y.dtype))


_NOTHING: PartStructs = (LoraPartStruct * MAX_PARTS)()


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
