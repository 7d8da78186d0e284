"""The norm before a linear layer, fused with the residual addition before it and the int8 quantisation after it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.int8_rows import Int8Rows
from kernels.rms_norm import add_rms_norm, add_rms_norm_int8, rms_norm, rms_norm_int8


class NormWeights(NamedTuple):
    weight: Tensor  # [size], the offset of Block.norm_offset included
    bias: Tensor | None = None  # [size]


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, to_int8: bool
) -> tuple[Tensor | Int8Rows, Tensor]:
    """x, delta [num_tokens, hidden] -> (norm of x + delta, x + delta). With `to_int8` the norm is quantised."""
    if delta is None:
        return (rms_norm_int8 if to_int8 else rms_norm)(x, weight, eps), x
    return (add_rms_norm_int8 if to_int8 else add_rms_norm)(delta, x, weight, eps)
