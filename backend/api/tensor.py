"""TensorData: a tensor that crosses processes."""

from __future__ import annotations

from msgspec import Struct


class TensorData(Struct, frozen=True):
    """The numbers in C order, little-endian."""

    dtype: str  # float32; of debug tensors int32 too
    shape: tuple[int, ...]
    data: bytes

    def of(self, index: int) -> TensorData:
        """The entry `index` of the first dimension, as a tensor whose first dimension is 1."""
        size = len(self.data) // self.shape[0]
        return TensorData(self.dtype, (1, *self.shape[1:]), self.data[index * size : (index + 1) * size])
