"""Tensors of results as torch's. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.api.tensor import TensorData

if TYPE_CHECKING:
    from torch import Tensor


def as_tensor(data: TensorData) -> Tensor:
    """A float32 tensor of its own memory."""
    import torch

    return torch.frombuffer(bytearray(data.data), dtype=torch.float32).reshape(data.shape)
