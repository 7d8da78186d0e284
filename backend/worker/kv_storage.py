"""KVStorage: the memory behind block ids, one pool per layer. The tier decides the layout of a block."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from kernels.common.transfer import place
from kernels.cpu.memory import allocate


class KVStorage:
    def __init__(
        self,
        num_layers: int,
        block_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[memoryview] | None = None,
    ) -> None:
        """`block_shape` is the shape of one layer's block. `layers`: memory of each layer's pool, only on a CPU: it has all its
        blocks at once, with the content that they have.
        """
        self._shape = block_shape
        self._dtype, self._device = dtype, device
        self.pools: list[Tensor] = [torch.empty(0, *block_shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.num_blocks = 0
        if layers is not None:
            self.pools = [torch.frombuffer(layer, dtype=dtype).view(-1, *block_shape) for layer in layers]
            self.num_blocks = len(self.pools[0])
        self._host: dict[int, list[Tensor]] = {}  # place -> swapped KV of each layer

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block id takes in all layers together."""
        return len(self.pools) * prod(self._shape) * self._dtype.itemsize

    def grow(self, num_blocks: int) -> None:
        """Make room for blocks 0 .. num_blocks-1, keeping the content of existing ones. Never shrinks."""
        if num_blocks <= self.num_blocks:
            return
        for layer, old in enumerate(self.pools):
            if len(old) < num_blocks:  # a pool may have grown before memory ran out for the next one
                new = self._allocate(num_blocks)
                new[: len(old)] = old
                self.pools[layer] = new
        self.num_blocks = num_blocks

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), with the result of copying them one after the other."""
        if not copies:
            return
        if self._device.type == "cpu":
            for pool in self.pools:
                # Torch would wake its threads for each block, which takes longer than the copy itself.
                blocks = pool.flatten(1).view(torch.uint8).numpy()
                for source, destination in copies:
                    blocks[destination] = blocks[source]
        elif _is_chain(copies):
            for pool in self.pools:
                for source, destination in copies:
                    pool[destination] = pool[source]
        else:
            sources, destinations = place(np.array(copies).T.copy(), self._device)
            for pool in self.pools:
                pool.index_copy_(0, destinations, pool.index_select(0, sources))

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (block, number of a place) to host memory, behind all that the device has been given."""
        for block, number in pairs:
            if number not in self._host:
                self._host[number] = [self._host_block() for _ in self.pools]
            for pool, host in zip(self.pools, self._host[number], strict=True):
                host.copy_(pool[block], non_blocking=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy back what `swap_out` has put into places (block, number of a place)."""
        for block, number in pairs:
            for pool, host in zip(self.pools, self._host[number], strict=True):
                pool[block].copy_(host, non_blocking=True)

    def _host_block(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, pin_memory=self._device.type == "cuda")

    def read(self, block_ids: Sequence[int]) -> bytes:
        """The content of these blocks: block after block, of each all layers in order."""
        layers = torch.stack([pool[list(block_ids)].flatten(1).view(torch.uint8) for pool in self.pools], dim=1)
        return layers.cpu().numpy().tobytes()

    def write(self, block_ids: Sequence[int], data: bytes) -> None:
        """Write what `read` has returned. Raises ValueError for another number of bytes."""
        shape = len(block_ids), len(self.pools), self.bytes_per_block // len(self.pools)
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape)
        for layer, pool in enumerate(self.pools):
            rows = blocks[:, layer].contiguous().view(self._dtype).view(len(block_ids), *self._shape)
            pool[list(block_ids)] = rows.to(self._device)

    def _allocate(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, *self._shape)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        return allocate(shape, self._dtype)


def _is_chain(copies: Sequence[tuple[int, int]]) -> bool:
    """True if the order of the copies matters: a block is written twice, or is both read and written."""
    destinations = [destination for _, destination in copies]
    return len(set(destinations)) < len(copies) or not set(destinations).isdisjoint(source for source, _ in copies)
