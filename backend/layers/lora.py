"""Adds LoRA adapters' parts to the outputs of a decoder layer's linear layers, for the torch and the triton tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.common.adapter import Layer, Part
from kernels.group_rows import Groups
from kernels.lora import group_tokens, lora

Adapt = Callable[[Tensor, Tensor, str], None]  # (y [tokens, n], x [tokens, k], a name of LINEARS): y += B (A x)


class AdaptedTokens(Protocol):
    """The adapters of a flat batch's tokens."""

    def add(self, layer: int, y: Tensor, x: Tensor, linear: str) -> None:
        """y [tokens, n], contiguous, += the adapters' part for the input x [tokens, k] of this layer's `linear`."""
        ...


class TorchAdapted:
    """Adapter by adapter, in float32."""

    def __init__(self, of_tokens: Sequence[tuple[Sequence[Layer], Tensor]]) -> None:
        """Each adapter's layers, and which tokens have it, int64."""
        self._of_tokens = of_tokens

    def add(self, layer: int, y: Tensor, x: Tensor, linear: str) -> None:
        for layers, tokens in self._of_tokens:
            rows = x[tokens].float()
            for part in layers[layer].get(linear, ()):
                columns = slice(part.first, part.first + len(part.b))
                added = (part.scale * (rows @ part.a.float().T)) @ part.b.float().T
                y[tokens, columns] = (y[tokens, columns].float() + added).to(y.dtype)


class Stack(NamedTuple):
    """All adapters of one linear layer, as kernels/lora.py reads them."""

    a: Tensor  # [slices, adapters, max_rank, k]
    b: Tensor  # [adapters, n, max_rank]; the factor alpha / rank is part of it
    offsets: tuple[int, ...]  # where each slice begins in n


class Stacks:
    """Adapters on a device, each in a place of its own, in one piece at the highest rank: zeros where it has nothing."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], int]],
        num_layers: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        block_bytes: int = 0,
    ) -> None:
        """shapes: of each linear layer the offsets of its projections, the last one being its n, and its k
        block_bytes: memory that is taken at a time, for at least one adapter
        """
        self._shapes, self._num_layers, self._max_rank = shapes, num_layers, max_rank
        self._block_bytes = block_bytes
        self._dtype, self._device = dtype, device
        self._layers: list[dict[str, Stack]] = []
        self._free: list[int] = []
        self._ranks = self._scales = torch.empty(0)

    @property
    def bytes_per_adapter(self) -> int:
        numbers = sum((len(offsets) - 1) * k + offsets[-1] for offsets, k in self._shapes.values())
        return self._num_layers * self._max_rank * numbers * self._dtype.itemsize

    def put(self, layers: Sequence[Layer]) -> int:
        """Returns the adapter's place."""
        place = self.reserve()
        self.fill(place, layers)
        return place

    def reserve(self) -> int:
        """A place. While one is being filled, none may be reserved: that may move all of them."""
        if not self._free:
            self._grow()
        return self._free.pop()

    @torch.inference_mode()
    def fill(self, place: int, layers: Sequence[Layer]) -> None:
        """Write an adapter into its place. Different places may be filled on different threads."""
        for stacks, layer in zip(self._layers, layers, strict=True):
            for name, stack in stacks.items():
                _fill(stack, place, layer.get(name, ()))
        self._ranks[place] = max(
            (part.rank for layer in layers for parts in layer.values() for part in parts), default=0
        )

    def take(self, place: int) -> None:
        """Give a place back."""
        self._free.append(place)

    def adapted(self, places: Tensor) -> StackedAdapted:
        """places int32 [tokens]: of each token's adapter, -1 for none."""
        return StackedAdapted(self._layers, self._ranks, self._scales, group_tokens(places, len(self._ranks)))

    def _grow(self) -> None:
        before = len(self._ranks)
        count = before + max(1, self._block_bytes // self.bytes_per_adapter)
        grown = []
        for index in range(self._num_layers):
            stacks = {name: self._empty(count, *shape) for name, shape in self._shapes.items()}
            of_layer = self._layers[index] if before else dict[str, Stack]()
            for name, old in of_layer.items():
                stacks[name].a[:, :before], stacks[name].b[:before] = old.a, old.b
            grown.append(stacks)
            if before:
                self._layers[index] = {}
        ranks = torch.zeros(count, dtype=torch.int32, device=self._device)
        ranks[:before] = self._ranks
        self._layers, self._ranks = grown, ranks
        self._scales = torch.ones(count, device=self._device)
        self._free += range(before, count)

    def _empty(self, count: int, offsets: tuple[int, ...], k: int) -> Stack:
        a = torch.zeros(len(offsets) - 1, count, self._max_rank, k, dtype=self._dtype, device=self._device)
        b = torch.zeros(count, offsets[-1], self._max_rank, dtype=self._dtype, device=self._device)
        return Stack(a, b, offsets)


class StackedAdapted:
    """On kernels/lora.py."""

    def __init__(self, layers: list[dict[str, Stack]], ranks: Tensor, scales: Tensor, groups: Groups) -> None:
        self._layers, self._ranks, self._scales, self._groups = layers, ranks, scales, groups

    def add(self, layer: int, y: Tensor, x: Tensor, linear: str) -> None:
        stack = self._layers[layer][linear]
        lora(y, x, stack.a, stack.b, self._ranks, self._scales, stack.offsets, self._groups)


def _fill(stack: Stack, place: int, parts: Sequence[Part]) -> None:
    stack.a[:, place], stack.b[place] = 0, 0
    for part in parts:
        end = part.first + len(part.b)
        for index, (start, stop) in enumerate(zip(stack.offsets, stack.offsets[1:])):
            if part.first < stop and start < end:
                stack.a[index, place, : part.rank] = part.a.to(stack.a.device)
        scaled = (part.b.float() * part.scale).to(stack.b.dtype)
        stack.b[place, part.first : end, : part.rank] = scaled.to(stack.b.device)
