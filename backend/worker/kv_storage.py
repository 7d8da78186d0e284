"""KVStorage: the memory behind block ids. One pool a layer; kernels/kv_write.py decides its layout."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KVStorage:
    def __init__(
        self, num_layers: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self._shape = (block_size, 2, kv_heads, head_dim)
        self._dtype, self._device = dtype, device
        self.pools: list[Tensor] = [torch.empty(0, *self._shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.num_blocks = 0

    @property
    def bytes_per_block(self) -> int:
        """Of all layers."""
        block_size, two, kv_heads, head_dim = self._shape
        return len(self.pools) * block_size * two * kv_heads * head_dim * self._dtype.itemsize

    def grow(self, num_blocks: int) -> None:
        """Have memory for blocks 0 .. num_blocks-1; what exists is copied. Never shrinks."""
        if num_blocks <= self.num_blocks:
            return
        for layer, old in enumerate(self.pools):
            new = self._allocate(num_blocks)
            new[: self.num_blocks] = old
            self.pools[layer] = new
        self.num_blocks = num_blocks

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), as if one after the other."""
        for pool in self.pools:
            for source, destination in copies:
                pool[destination] = pool[source]

    def _allocate(self, num_blocks: int) -> Tensor:
        shape = (num_blocks, *self._shape)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # Zeroed by the kernel page by page when first touched: a large pool costs nothing until it is used.
        num_bytes = int(np.prod(shape)) * self._dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(self._dtype).view(shape)
