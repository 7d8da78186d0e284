"""The gate of a SwiGLU MLP (Shazeer, 2020).

y = silu(gate) * up          for gate_up = [gate | up] along the last dimension
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

CASES = [(1, 64), (7, 96), (33, 512)]  # shapes of gate_up


def reference(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 * intermediate] -> [num_tokens, intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    return reference(gate_up)
