"""Rows of activations in int8, for the quantised products (SmoothQuant, Xiao et al., 2023; QServe, Lin et al., 2024).

    scale = max |y| / 127, q = floor(y * (127 / max |y|) + 0.5)         (all 0 where max |y| < MIN_MAGNITUDE)
    sums[g] = the sum of q over the columns of group g, which has 128 columns; the last one may have fewer

The sums are over the integers, not over y, so that a product can correct for a weight's zero points exactly. The kernels
that make y (norm.py, activation.py, and quantize of w8a8.py) quantise it as their last step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.triton_runtime import jit, tl

GROUP = 128  # columns of a sum
MIN_MAGNITUDE = 1e-35  # below this max |y|, 127 / max |y| would overflow


class Int8Rows(NamedTuple):
    q: Tensor  # int8 [rows, k]
    scale: Tensor  # float32 [rows]
    sums: Tensor  # int32 [rows, ceil(k / GROUP)]


def reference(y: Tensor) -> Int8Rows:
    """Quantises y [rows, k]."""
    y = y.float()
    largest = y.abs().amax(1)
    largest = torch.where(largest < MIN_MAGNITUDE, 0.0, largest)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest.clamp(min=MIN_MAGNITUDE), 0.0)
    q = torch.floor(y * inverse[:, None] + 0.5).to(torch.int8)
    return Int8Rows(q, largest / 127, group_sums(q))


def group_sums(q: Tensor) -> Tensor:
    """Sums each group of GROUP columns of q int8 [rows, k]; returns int32 [rows, ceil(k / GROUP)]."""
    filled = F.pad(q, (0, -q.shape[1] % GROUP))
    grouped: Tensor = filled.unflatten(1, (-1, GROUP))
    return grouped.sum(2, dtype=torch.int32)


def empty(rows: int, k: int, device: torch.device) -> Int8Rows:
    """Uninitialised rows for a kernel to fill."""
    return Int8Rows(
        torch.empty(rows, k, dtype=torch.int8, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, -(-k // GROUP), dtype=torch.int32, device=device),
    )


@jit
def int8_scales(largest):
    """max |y| of a row, float32 -> (scale, the factor of y before rounding)."""
    largest = tl.where(largest < 1e-35, 0.0, largest)
    return largest / 127.0, tl.where(largest > 0, 127.0 / tl.maximum(largest, 1e-35), 0.0)


@jit
def store_int8(
    y,  # float32 [BLOCK]: columns start, start + 1, ... of a row; 0 past its end
    inverse,  # the factor of y from int8_scales
    q,  # a row: [k] int8
    sums,  # a row's sums, [ceil(k / 128)] int32
    start,  # a multiple of 128
    k,
    BLOCK: tl.constexpr,  # a power of two
):
    """Stores a part of a row as int8, and the sums of its groups."""
    GROUPS: tl.constexpr = (BLOCK + 127) // 128
    columns = start + tl.arange(0, BLOCK)
    rounded = tl.floor(y * inverse + 0.5).to(tl.int32)
    tl.store(q + columns, rounded.to(tl.int8), columns < k)
    groups = start // 128 + tl.arange(0, GROUPS)
    totals = tl.sum(tl.reshape(rounded, (GROUPS, BLOCK // GROUPS)), 1)
    tl.store(sums + groups, totals, groups * 128 < k)
