"""Weights that are rounded to types of llama.cpp's (super_blocks.py): `model.quantization=w4a8` and the others of ROUNDED.

    of values (IQ4_NL)      w[r, c] ~ q[r, c] * scale[r, g]                     q one of VALUES
    of levels (Q5_1)        w[r, c] ~ q[r, c] * scale[r, g] - minimum[r, g]     q of 0 .. 2^bits - 1

g = c / GROUP; scale and minimum are float16. VALUES are spaced as those of a normal distribution are.

What a group has is searched for. Of values: the largest number is mapped to 0.8 .. 1.12 of the least and of the greatest value.
Of levels: the least and the greatest number, drawn to 0.9 .. 1.06 of their distance from the middle, are mapped to the first and
the last level. All numbers are rounded to the nearest, and of what least squares then gives, that with the least error is taken.
The error of a column counts as much as its inputs do: `importance` [k] is their mean square (imatrix of llama.cpp; AWQ, Lin et
al., 2023). docs/quantisation.md says what it gains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.common.quantize import dequantize, row_slices, to_groups
from kernels.common.super_blocks import FORMS, NL, Form, Kind, SuperBlocks

ROUNDED: dict[str, Kind] = {"w4a8": "IQ4_NL", "w6a8": "Q5_1"}  # names have the bits of a weight, scales included
VALUES = NL
GROUP = 32
PARTS = [part / 25 for part in range(20, 29)]  # parts of the least or greatest value
REACHES = [part / 50 for part in range(45, 54, 2)]  # parts of the distance from the middle of a group's numbers


class Rounded(NamedTuple):
    """A weight [n, k]."""

    q: Tensor  # int8 [n, k]
    scale: Tensor  # float32 [n, ceil(k / GROUP)]
    minimum: Tensor | None  # like scale; None: 0


Round = Callable[[Tensor, str, Tensor | None], Rounded]  # round_weight


def form_of(name: str) -> Form:
    """The form of blocks of a name in ROUNDED."""
    return FORMS[ROUNDED[name]]


def bits_of(name: str) -> float:
    """Bits of a weight, scales and minima included."""
    form = form_of(name)
    return form.bits + 16 * (1 + form.has_minima) / form.group


def round_weight(w: Tensor, name: str, importance: Tensor | None = None) -> Rounded:
    """Rounds w [n, k] of any float type; importance [k] is positive, None: that of all is the same.

    The reference of native/rounding.cpp, which is some hundred times as fast.
    """
    form = form_of(name)
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], -(-w.shape[1] // GROUP), dtype=torch.float32, device=w.device)
    minimum = torch.empty_like(scale) if form.has_minima else None
    counts = to_groups((torch.ones(w.shape[1], device=w.device) if importance is None else importance)[None], GROUP)[0]
    for rows in row_slices(*w.shape):
        grouped = to_groups(w[rows], GROUP)
        if minimum is None:
            scale[rows] = stored(best_scales(grouped, counts))
        else:
            scale[rows], minimum[rows] = map(stored, best_ranges(grouped, counts, 2**form.bits - 1))
            grouped = grouped + minimum[rows][:, :, None]
        divisor = torch.where(scale[rows] != 0, scale[rows], 1)
        of_scale = grouped / divisor[:, :, None]
        found = _nearest(of_scale) if minimum is None else of_scale.round().clamp(0, 2**form.bits - 1)
        q[rows] = found.flatten(1)[:, : w.shape[1]].to(torch.int8)
    return Rounded(q, scale, minimum)


def floats(rounded: Rounded) -> Tensor:
    """float32 [n, k]."""
    weight = dequantize(rounded.q, rounded.scale, GROUP)
    if rounded.minimum is None:
        return weight
    return weight - rounded.minimum.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


def in_blocks(rounded: Rounded, name: str) -> SuperBlocks:
    """The same numbers, with columns behind the last one up to a whole block."""
    q = rounded.q.view(torch.uint8) if rounded.minimum is not None else indices(rounded.q)
    minimum = None if rounded.minimum is None else rounded.minimum.half()
    padded = F.pad(q, (0, -q.shape[1] % GROUP))
    return SuperBlocks(ROUNDED[name], padded, None, None, rounded.scale.half(), minimum)


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


def best_ranges(grouped: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The best scales and minima [rows, groups] of numbers as for `best_scales` and levels 0 .. most; a group of one number has
    the scale 0.
    """
    least, greatest = grouped.amin(2), grouped.amax(2)
    middle, half = (least + greatest) / 2, (greatest - least) / 2
    total = counts.sum(1)
    mean = (counts * grouped).sum(2) / total
    x = grouped - mean[:, :, None]
    best, scale, level = torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
    for below in REACHES:
        for above in REACHES:
            step = half * (below + above) / most
            first = middle - half * below
            q = ((grouped - first[:, :, None]) / torch.where(step != 0, step, 1)[:, :, None]).round().clamp(0, most)
            mean_level = (counts * q).sum(2) / total
            q -= mean_level[:, :, None]
            with_x, with_itself = (counts * q * x).sum(2), (counts * q * q).sum(2)
            explained = (
                with_x * with_x / with_itself
            )  # how much of the sum of x^2; not a number where all are of one level
            is_better = explained > best
            scale = torch.where(is_better, with_x / with_itself, scale)
            level = torch.where(is_better, mean_level, level)
            best = torch.where(is_better, explained, best)
    return scale, scale * level - mean


def _nearest(x: Tensor) -> Tensor:
    """The nearest of VALUES, as float32."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=x.device)
    return values[torch.bucketize(x, (values[1:] + values[:-1]) / 2)]
