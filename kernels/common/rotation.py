"""Weights rounded to eight bits for inputs that are rotated first: `model.quantization=w8a8` on a CPU.

    y = x w^T = (x H) (w H / b)^T

H is Hadamard's matrix of b columns (Sylvester's, of +1 and -1; H H^T = b), applied to each b columns of x and w by itself.

A value that is far from the others, as activations have them, decides the scale of its group and leaves the others few steps. A
rotation spreads it over b columns, whose numbers then are alike, so that more columns share a scale: in groups of up to 512 the
error is about that of groups of 32 without rotation, and integers are summed up over the whole group. QuaRot (Ashkboos et al.,
2024) rotates whole rows; blocks keep what one value costs to its neighbourhood.

    b          the greatest power of two that divides the columns, at most 256
    group      the greatest multiple of 64 that divides the columns, at most 512 and at most 4 b
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.common.quantize import quantize_weight, row_slices

Rotate = Callable[[Tensor], Tensor]
Round = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # (weight, group) -> (int8, scales)
MOST_TOGETHER, MOST_IN_GROUP, MOST_BLOCKS = 256, 512, 4


def block_of(columns: int) -> int:
    """Columns that are rotated together."""
    return min(columns & -columns, MOST_TOGETHER)


def group_of(columns: int) -> int | None:
    """Columns that share a scale; None where columns are not rotated, for they are no multiple of 64."""
    most = min(MOST_IN_GROUP, MOST_BLOCKS * block_of(columns), columns)
    return next((group for group in range(most // 64 * 64, 0, -64) if columns % group == 0), None)


def rotate(x: Tensor) -> Tensor:
    """x [rows, columns] of any float type times H, float32. Numbers grow by up to b, on average by the root of b."""
    block = block_of(x.shape[1])
    rotated: Tensor = x.float().unflatten(1, (-1, block))
    half = 1
    while half < block:  # in the order of native/rotation.h
        a, b = rotated.unflatten(2, (-1, 2, half)).unbind(3)
        rotated, half = torch.stack([a + b, a - b], 3).flatten(2), 2 * half
    whole: Tensor = rotated.flatten(1)
    return whole


def round_weight(
    w: Tensor, group: int, rotated: Rotate = rotate, rounded: Round = quantize_weight
) -> tuple[Tensor, Tensor]:
    """w [n, k] of any float type times H / b, rounded; returns int8 [n, k], scale float32 [n, k / group].

    `rotated` is `rotate`, or computes the same bits in less time. `rounded` gets slices of rows.
    """
    q, scale = (
        torch.empty(w.shape, dtype=torch.int8, device=w.device),
        torch.empty(len(w), w.shape[1] // group, device=w.device),
    )
    for rows in row_slices(*w.shape):
        q[rows], scale[rows] = rounded(rotated(w[rows]) / block_of(w.shape[1]), group)
    return q, scale
