"""Copies between host and device through pinned memory.

A copy from or to pageable memory would block the host until the device has finished all queued work.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def place(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`: on a CPU the same memory, else a copy that is queued but may not be finished."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def even(count: int) -> int:
    """`count` rounded up to an even number.

    In a table with that many int64 columns every row begins at a multiple of 16 bytes, the alignment that Triton compiles
    kernels for.
    """
    return count + count % 2


class Fetched:
    """Starts copying tensors to the host; `wait` returns them when they have arrived."""

    def __init__(self, *tensors: Tensor):
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            self.tensors = [tensor.clone() for tensor in tensors]
            return
        self.tensors = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for here, there in zip(self.tensors, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self.tensors
