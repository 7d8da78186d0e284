"""A LoRA adapter's weights, in the places of a model's linear layers where they are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

LINEARS = ("qkv", "out", "gate_up", "down")  # the linear layers of a layer of this engine's own decoder
MAX_PARTS = 3  # projections of a fused layer


class Part(NamedTuple):
    """One projection: columns first .. first + n of a layer's output get scale * b (a x)."""

    first: int
    a: Tensor  # [rank, k]
    b: Tensor  # [n, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


Layer = Mapping[str, Sequence[Part]]  # by the names of linear layers
