"""Tensors of requests and results, from torch's and as torch's. Importing this loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backend.api.tensor import TensorData

if TYPE_CHECKING:
    from torch import Tensor


def as_tensor(data: TensorData) -> Tensor:
    """A tensor of its own memory, in the dtype that the data names."""
    import torch

    dtype = torch.int32 if data.dtype == "int32" else torch.float32
    if not data.data:
        return torch.empty(data.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data.data), dtype=dtype).reshape(data.shape)


def as_data(tensor: Tensor) -> TensorData:
    """A copy of a tensor of any type and device, in float32."""
    return TensorData("float32", tuple(tensor.shape), tensor.detach().float().cpu().contiguous().numpy().tobytes())
