"""Weights rounded to four bits, as llama.cpp's type IQ4_NL has them: `model.quantization=w4a8`.

    w[r, c] ~ q[r, c] * scale[r, g]        q[r, c] one of VALUES, g = c / GROUP; scale a float16

That is 4.5 bits a weight. VALUES are spaced as those of a normal distribution are (super_blocks.py, IQ4_NL).

A group's scale is searched for: the largest number is mapped to 0.8 .. 1.12 of the least and of the greatest value, all
numbers are rounded to the nearest value, and of the scales that least squares then gives, the one with the least error is taken.
The error of a column counts as much as its inputs do: `importance` [k] is their mean square (imatrix of llama.cpp; AWQ, Lin et
al., 2023). docs/quantisation.md says what it gains.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.quantize import row_slices, to_groups
from kernels.common.super_blocks import NL

VALUES = NL
GROUP = 32
PARTS = [
    part / 25 for part in range(20, 29)
]  # parts of the least or greatest value that the largest number is mapped to


def round_weight(w: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rounds w [n, k] of any float type; importance [k] is positive, None: that of all is the same. Returns q int8 [n, k] and
    scale float32 [n, ceil(k / GROUP)].

    The reference of native/rounding.cpp, which is some hundred times as fast.
    """
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], -(-w.shape[1] // GROUP), dtype=torch.float32, device=w.device)
    counts = to_groups((torch.ones(w.shape[1], device=w.device) if importance is None else importance)[None], GROUP)[0]
    for rows in row_slices(*w.shape):
        grouped = to_groups(w[rows], GROUP)
        scale[rows] = stored(best_scales(grouped, counts))
        divisor = torch.where(scale[rows] != 0, scale[rows], 1)
        q[rows] = _nearest(grouped / divisor[:, :, None]).flatten(1)[:, : w.shape[1]].to(torch.int8)
    return q, scale


def stored(scale: Tensor) -> Tensor:
    """The nearest float16 to a scale, float32."""
    return scale.clamp(-65504, 65504).half().float()


def indices(q: Tensor) -> Tensor:
    """The places in VALUES, uint8, of q int8, whose numbers all are some of VALUES."""
    table = torch.zeros(256, dtype=torch.uint8, device=q.device)
    table[[value % 256 for value in VALUES]] = torch.arange(len(VALUES), dtype=torch.uint8, device=q.device)
    return table.index_select(0, q.flatten().view(torch.uint8).int()).view(q.shape)


def best_scales(grouped: Tensor, counts: Tensor) -> Tensor:
    """The best scales [rows, groups] of numbers [rows, groups, GROUP], whose errors count so often [groups, GROUP]; 0 where all
    of them are 0.
    """
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    best, scale = torch.zeros_like(largest[:, :, 0]), torch.zeros_like(largest[:, :, 0])
    for value in (VALUES[0], VALUES[-1]):
        for part in PARTS:
            q = _nearest(grouped * (value * part / torch.where(largest != 0, largest, 1)))
            with_x, with_itself = (counts * q * grouped).sum(2), (counts * q * q).sum(2)
            explained = with_x * with_x / with_itself
            scale = torch.where(explained > best, with_x / with_itself, scale)
            best = torch.maximum(best, explained)
    return scale


def _nearest(x: Tensor) -> Tensor:
    """The nearest of VALUES, as float32."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=x.device)
    return values[torch.bucketize(x, (values[1:] + values[:-1]) / 2)]
