"""Weights rounded to four bits that stand for 16 values spaced as those of a normal distribution are: `model.quantization=w4a8`
on a CPU, unless two_levels.py is faster there and the columns can be rotated.

    w[r, c] ~ q[r, c] * scale[r, g]        q[r, c] one of VALUES, g = c / group; scale a bfloat16

In groups of 32 that is 4.5 bits a weight.

A group's scale is searched for: the largest number is mapped to 0.8 .. 1.12 of the least and of the greatest value, all
numbers are rounded to the nearest value, and of the scales that least squares then gives, the one with the least error is taken.
On normally distributed weights in groups of 32 the error is 7.3 %, where 16 evenly spaced values leave 8.1 %, and evenly spaced
ones with a zero point, which take more memory, 7.7 %. VALUES are those of llama.cpp's IQ4_NL (ggml-common.h, `kvalues_iq4nl`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.quantize import row_slices, to_groups

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
        scale[rows] = best_scales(grouped)
        divisor = torch.where(scale[rows] != 0, scale[rows], 1)
        q[rows] = _nearest(grouped / divisor[:, :, None]).flatten(1)[:, : w.shape[1]].to(torch.int8)
    return q, scale


def indices(q: Tensor) -> Tensor:
    """The places in VALUES, uint8, of q int8, whose numbers all are some of VALUES."""
    table = torch.zeros(256, dtype=torch.uint8, device=q.device)
    table[[value % 256 for value in VALUES]] = torch.arange(len(VALUES), dtype=torch.uint8, device=q.device)
    return table.index_select(0, q.flatten().view(torch.uint8).int()).view(q.shape)


def best_scales(grouped: Tensor) -> Tensor:
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


def _nearest(x: Tensor) -> Tensor:
    """The nearest of VALUES, as float32."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=x.device)
    return values[torch.bucketize(x, (values[1:] + values[:-1]) / 2)]
