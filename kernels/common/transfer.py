"""Numbers between host and device, without waiting for the device: pageable copies would wait for all that it still has to do."""

from __future__ import annotations

import torch
from numpy.typing import NDArray
from torch import Tensor


def place(array: NDArray, device: torch.device) -> Tensor:
    """The array on `device`: the same memory on a CPU, else a copy that is under way, from pinned memory of its own."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def even(count: int) -> int:
    """The least even number from `count` on: rows of so many int64 begin at 16 bytes, for which kernels are compiled."""
    return count + count % 2


class Fetched:
    """Tensors on their way to the host. `wait` once, then read `tensors`."""

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
