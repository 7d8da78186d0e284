"""A row of activations as int8, for the quantised products (SmoothQuant, Xiao et al., 2023; QServe, Lin et al., 2024).

    scale = max |y| / 127, q = floor(y * (127 / max |y|) + 0.5), sum = the sum of q         (all 0 where max |y| < LEAST)

The sum is that of the integers, not of y, so that a product can correct for a weight's zero point exactly. The
kernels that make y (rms_norm.py, silu_mul.py, w8a8.py's quantize) end with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.triton_runtime import jit, tl

LEAST = 1e-35  # 127 / max |y| would overflow below


def reference(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y [rows, k] -> (q int8 [rows, k], scale float32 [rows], sum int32 [rows])."""
    y = y.float()
    most = y.abs().amax(1)
    most = torch.where(most < LEAST, 0.0, most)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most.clamp(min=LEAST), 0.0)
    q = torch.floor(y * inverse[:, None] + 0.5).to(torch.int8)
    return q, most / 127, q.sum(1, dtype=torch.int32)


@jit
def int8_scales(most):
    """max |y| of a row, float32 -> (scale, what y is multiplied by)."""
    most = tl.where(most < 1e-35, 0.0, most)
    return most / 127.0, tl.where(most > 0, 127.0 / tl.maximum(most, 1e-35), 0.0)
