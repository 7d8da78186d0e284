"""Symmetric int8 with one scale for each row and group of consecutive columns.

    scale[r, g] = max |x[r, c]| / 127        over the columns of group g, which are g * group <= c < (g + 1) * group;
                                             of a weight: rounded up to a bfloat16, so that two bytes hold it exactly
    q[r, c]     = clamp(round(x[r, c] / scale[r, g]), -127, 127)        half to even; 0 where the scale is 0
    x[r, c]     ~ q[r, c] * scale[r, g]

All other numbers are float32. The last group is shorter when the columns are no multiple of `group`; a `group` equal to the
number of columns means one scale a row. Rows of a weight are output features; rows of activations are tokens. Because every
row has scales of its own, stacking quantised weights is exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Columns that share a scale. With these neither format of 8 bits is worse than llama.cpp's q8_0.
DEFAULT_GROUPS = {"int8": 64, "w8a8": 32}
ELEMENTS_AT_ONCE = 1 << 20  # elements of a weight in a slice, which bounds the memory of float32 copies

# (rows, columns, group)
CASES = [(1, 1, 32), (3, 64, 64), (5, 100, 32), (17, 130, 64), (2, 31, 64), (40, 384, 128), (7, 90, 90), (0, 64, 32)]


def quantize_activations(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises x [tokens, k] of any float type; returns q int8 [tokens, k], scale float32 [tokens, ceil(k / group)]."""
    rows, columns = x.shape
    num_groups = -(-columns // group)
    grouped = F.pad(x.float(), (0, num_groups * group - columns)).view(rows, num_groups, group)
    scale = grouped.abs().amax(2) / 127
    q = (grouped / torch.where(scale > 0, scale, 1)[:, :, None]).round_().clamp_(-127, 127)
    return q.flatten(1)[:, :columns].to(torch.int8).contiguous(), scale


def quantize_weight(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Quantises w [n, k] of any float type; returns q int8 [n, k], scale float32 [n, ceil(k / group)], each a bfloat16."""
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], -(-w.shape[1] // group), dtype=torch.float32, device=w.device)
    for rows in row_slices(*w.shape):
        grouped = to_groups(w[rows], group)
        scale[rows] = _up_to_bfloat16(grouped.abs().amax(2) / 127)
        q[rows] = _rounded(grouped, scale[rows], w.shape[1])
    return q, scale


def dequantize(q: Tensor, scale: Tensor, group: int) -> Tensor:
    """Returns float32 [rows, columns] of q int8 [rows, columns], scale float32 [rows, ceil(columns / group)]."""
    return q * scale.repeat_interleave(group, dim=1)[:, : q.shape[1]]


def row_slices(rows: int, columns: int) -> list[slice]:
    """Cuts [rows, columns] into runs of rows of about ELEMENTS_AT_ONCE elements."""
    step = max(1, ELEMENTS_AT_ONCE // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def to_groups(x: Tensor, group: int) -> Tensor:
    """Views x [rows, columns] as float32 [rows, groups, group], with zeros behind the last column."""
    rows, columns = x.shape
    num_groups = -(-columns // group)
    return F.pad(x.float(), (0, num_groups * group - columns)).view(rows, num_groups, group)


def _rounded(grouped: Tensor, scale: Tensor, columns: int) -> Tensor:
    """Rounds values [rows, groups, group] by their scales [rows, groups]; returns int8 [rows, columns]."""
    q = (grouped / torch.where(scale > 0, scale, 1)[:, :, None]).round_().clamp_(-127, 127)
    return q.view(q.shape[0], -1)[:, :columns].to(torch.int8).contiguous()


def _up_to_bfloat16(x: Tensor) -> Tensor:
    """Rounds x, which is not negative, up to a bfloat16; returns float32."""
    bits = x.view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
