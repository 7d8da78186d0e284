"""The norm before a linear layer, fused with the residual addition before it and the int8 quantisation after it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backend.architectures.description import Block
from kernels import norm as kernel
from kernels.int8_rows import Int8Rows


class NormWeights(NamedTuple):
    weight: Tensor  # [size], the offset of Block.norm_offset included
    bias: Tensor | None = None  # [size]


def norm(x: Tensor, weights: NormWeights | None, block: Block) -> Tensor:
    """Norm of the last dimension of x; without weights there is none, and x itself is returned."""
    return x if weights is None else kernel.norm(x, *_arguments(weights, block))


def add_norm(
    x: Tensor, delta: Tensor | None, weights: NormWeights | None, block: Block, to_int8: bool
) -> tuple[Tensor | Int8Rows, Tensor]:
    """x, delta [num_tokens, hidden] -> (norm of y, y) for y = x + residual_scale * delta; without weights both are y.

    With `to_int8` the norm is quantised.
    """
    if weights is None:
        y = add(x, delta, block)
        return y, y
    arguments = _arguments(weights, block)
    if delta is None:
        return (kernel.norm_int8 if to_int8 else kernel.norm)(x, *arguments), x
    return (kernel.add_norm_int8 if to_int8 else kernel.add_norm)(delta, x, *arguments, block.residual_scale)


def add(x: Tensor, delta: Tensor | None, block: Block) -> Tensor:
    """x + residual_scale * delta."""
    return x if delta is None else torch.add(x, delta, alpha=block.residual_scale)


def _arguments(weights: NormWeights, block: Block) -> tuple[Tensor, float, Tensor | None, bool]:
    """Weight, eps, bias, and whether the mean is subtracted, as kernels/norm.py takes them."""
    return weights.weight, block.norm_eps, weights.bias, block.norm == "layer"
