"""Weights rounded to four bits that stand for 16 values spaced as those of a normal distribution are: `model.quantization=w4a8`.

    w[r, c] ~ q[r, c] * scale[r, g]        q[r, c] one of VALUES, g = c / group; scale a bfloat16

    scale[r, g] = shared[r, c / 256] * multiple[r, g]        in groups of 32, if the columns are whole super-blocks of 256;
                                                             shared a bfloat16, multiple -127 .. 127: 4.31 bits a weight

A group's scale is searched for: the largest number is mapped to 0.8 .. 1.12 of the least and of the greatest value, all
numbers are rounded to the nearest value, and of the scales that least squares then gives, the one with the least error is taken.
On normally distributed weights in groups of 32 the error is 7.3 %, where 16 evenly spaced values leave 8.1 %, and evenly spaced
ones with a zero point, which take more memory, 7.7 %. VALUES are those of llama.cpp's IQ4_NL (ggml-common.h, `kvalues_iq4nl`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.quantize import row_slices, to_groups
from kernels.common.super_blocks import COLUMNS

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
PARTS = [
    part / 25 for part in range(20, 29)
]  # parts of the least or greatest value that the largest number is mapped to


def round_weight(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rounds w [n, k] of any float type; returns q int8 [n, k] and scale float32 [n, ceil(k / group)].

    The reference of native/rounding.cpp, which is some hundred times as fast.
    """
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], -(-w.shape[1] // group), dtype=torch.float32, device=w.device)
    for rows in row_slices(*w.shape):
        grouped = to_groups(w[rows], group)
        scale[rows] = _shared(_scales(grouped)) if in_super_blocks(w.shape[1], group) else _scales(grouped)
        divisor = torch.where(scale[rows] != 0, scale[rows], 1)
        q[rows] = _nearest(grouped / divisor[:, :, None]).flatten(1)[:, : w.shape[1]].to(torch.int8)
    return q, scale


def in_super_blocks(columns: int, group: int) -> bool:
    """True if groups share scales."""
    return group == 32 and columns % COLUMNS == 0


def multiples(scale: Tensor) -> tuple[Tensor, Tensor]:
    """The multiples int8 [n, groups] and the shared scales bfloat16 [n, groups / 8] of scales that are shared, exactly.

    The greatest multiple of a super-block is 127, because a bfloat16 is nearer to any number than 1 / 254 of it.
    """
    of_blocks = scale.unflatten(1, (-1, COLUMNS // 32))
    shared = of_blocks.abs().amax(2) / 127
    return (of_blocks / shared.where(shared != 0, 1)[:, :, None]).flatten(1).to(torch.int8), shared.bfloat16()


def indices(q: Tensor) -> Tensor:
    """The places in VALUES, uint8, of q int8, whose numbers all are some of VALUES."""
    table = torch.zeros(256, dtype=torch.uint8, device=q.device)
    table[[value % 256 for value in VALUES]] = torch.arange(len(VALUES), dtype=torch.uint8, device=q.device)
    return table.index_select(0, q.flatten().view(torch.uint8).int()).view(q.shape)


def _scales(grouped: Tensor) -> Tensor:
    """The best scales [rows, groups] of numbers [rows, groups, group]; 0 where all of them are 0."""
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    best, scale = torch.zeros_like(largest[:, :, 0]), torch.zeros_like(largest[:, :, 0])
    for value in (VALUES[0], VALUES[-1]):
        for part in PARTS:
            q = _nearest(grouped * (value * part / torch.where(largest != 0, largest, 1)))
            with_x, with_itself = (q * grouped).sum(2), (q * q).sum(2)
            explained = with_x * with_x / with_itself
            scale = torch.where(explained > best, with_x / with_itself, scale)
            best = torch.maximum(best, explained)
    return scale.bfloat16().float()


def _shared(scale: Tensor) -> Tensor:
    """Scales [n, groups], each rounded to a multiple of one bfloat16 for a super-block."""
    of_blocks = scale.unflatten(1, (-1, COLUMNS // 32))
    shared = (of_blocks.abs().amax(2, keepdim=True) / 127).bfloat16().float()
    rounded: Tensor = (of_blocks / shared.where(shared != 0, 1)).round() * shared
    return rounded.flatten(1)


def _nearest(x: Tensor) -> Tensor:
    """The nearest of VALUES, as float32."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=x.device)
    return values[torch.bucketize(x, (values[1:] + values[:-1]) / 2)]
