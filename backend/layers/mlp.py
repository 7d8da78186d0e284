"""The SwiGLU MLP with gate and up projections fused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.layers.linear import Linear
from kernels.silu_mul import silu_mul


@dataclass(slots=True)
class MlpWeights:
    gate_up: Linear  # [2 * intermediate, hidden], rows in the order gate, up
    down: Linear  # [hidden, intermediate]


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]."""
    return weights.down(silu_mul(weights.gate_up(x)))
