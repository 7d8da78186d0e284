"""The SwiGLU MLP with gate and up projections fused."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backend.layers.linear import Linear
from kernels.int8_rows import Int8Rows
from kernels.silu_mul import silu_mul, silu_mul_int8


@dataclass(slots=True)
class MlpWeights:
    gate_up: Linear  # [2 * intermediate, hidden], rows in the order gate, up
    down: Linear  # [hidden, intermediate]


def mlp(x: Tensor | Int8Rows, weights: MlpWeights) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]."""
    gate_up = weights.gate_up(x)
    return weights.down(silu_mul_int8(gate_up) if weights.down.takes_int8 else silu_mul(gate_up))
