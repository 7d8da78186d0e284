"""The SwiGLU MLP with gate and up projections fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kernels.silu_mul import silu_mul


@dataclass(slots=True)
class MlpWeights:
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    """x [num_tokens, hidden] -> [num_tokens, hidden]."""
    return F.linear(silu_mul(F.linear(x, weights.gate_up, weights.gate_up_bias)), weights.down, weights.down_bias)
