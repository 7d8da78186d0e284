"""TensorData: a tensor that crosses processes."""

from __future__ import annotations

from msgspec import Struct


class TensorData(Struct, frozen=True):
    """The numbers in C order, little-endian."""

    dtype: str  # float32; of debug tensors int32 too
    shape: tuple[int, ...]
    data: bytes
