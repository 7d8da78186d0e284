"""Weights rounded to four bits below scales of two levels, for inputs that are rotated first: `model.quantization=w4a8` on a CPU
of FASTER_ON.

    y = (x H) (w H / b)^T                        as in rotation.py, whose blocks and groups these are
    w H / b [r, c] ~ q[r, c] * scale[r, g]       g = c / group; scale a bfloat16; q an int8 that is one of
    LEVELS[m] = (m * VALUES + 64) >> 7           16 whole numbers of -63 .. 63, where m[r, c / 32] of -63 .. 63 is an int8

A weight is four bits, 32 of them share the multiple m, and a group shares the scale: 4 + 8 / 32 + 16 / group bits. The product of
a group is a sum of integers, as that of eight bits is (progressive quantisation: QServe, Lin et al., 2024). VALUES are
four_bits.py's, spaced as those of a normal distribution are, and rotated weights are nearly distributed so. Levels have seven
bits, which lose little beside the four of a weight: pairs of products then fit 16 bits on processors without VNNI.

A scale and its multiples are searched for. The best scale of each 32 columns is found as four_bits.py does. The greatest of them,
or 95 % of it, has the multiple 63; every other gets the nearest multiple, or one beside it, whichever leaves the least squared
error. On normal numbers in groups of 512 the error is 7.4 %; with a float for each 32 columns it would be 7.3 %.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common.four_bits import VALUES, best_scales
from kernels.common.quantize import row_slices

# Instruction sets (kernels/cpu/isa.py) on which this form was measured to be faster than groups of 32 (four_bits.py), which lose
# less quality: 1.04 to 1.5 times on AVX2; with AVX-512 and VNNI 0.84 to 0.99 times. On any other, groups of 32 are used.
FASTER_ON = ("avx2",)
CHUNK = 32  # columns that share a multiple
MOST = 63  # the greatest multiple
PARTS = (1.0, 0.95)  # the share of the greatest scale that the multiple MOST stands for


def levels_of(multiples: Tensor) -> Tensor:
    """multiples [...] of any type -> LEVELS float32 [..., 16]; rising for multiples that are positive."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=multiples.device)
    return torch.floor((multiples.float()[..., None] * values + 64) / 128)


def round_weight(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Rounds rotated weights w [n, k]; returns q int8 [n, k], scale float32 [n, k / group].

    k is a multiple of `group`, which is one of CHUNK and at most 512. The reference of native/rounding.cpp, which is some hundred
    times as fast.
    """
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], w.shape[1] // group, device=w.device)
    for rows in row_slices(*w.shape):
        chunks = w[rows].float().unflatten(1, (-1, group // CHUNK, CHUNK))
        rounded, scale[rows] = _round_groups(chunks)
        q[rows] = rounded.flatten(1).to(torch.int8)
    return q, scale


def _round_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, groups, chunks, CHUNK] -> levels, shaped like x, and scales [n, groups]."""
    ideal = best_scales(x.flatten(1, 2)).view(x.shape[:3])
    largest = ideal.abs().amax(2)
    best = torch.full_like(largest, torch.inf)
    scale, q = torch.zeros_like(largest), torch.zeros_like(x)
    for part in PARTS:
        tried = (largest * (128 / MOST) * part).bfloat16().float()
        rounded, error = _round_chunks(x / tried.where(tried > 0, 1)[..., None, None], ideal * 128, tried)
        is_better = (error < best) & (tried > 0)
        best, scale = error.where(is_better, best), tried.where(is_better, scale)
        q = rounded.where(is_better[..., None, None], q)
    return q, scale


def _round_chunks(x: Tensor, ideal: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in units of `scale` [n, groups] -> levels of the best multiples, and squared errors [n, groups] of weights."""
    nearest = (ideal / scale.where(scale > 0, 1)[..., None]).round()
    best, q = torch.full_like(ideal, torch.inf), torch.zeros_like(x)
    for step in (-1, 0, 1):
        levels = levels_of((nearest + step).clamp(-MOST, MOST)).sort(3).values
        middles = (levels[..., 1:] + levels[..., :-1]) / 2
        rounded = levels.gather(3, torch.searchsorted(middles, x))
        error = (rounded - x).square().sum(3)
        is_better = error < best
        best, q = error.where(is_better, best), rounded.where(is_better[..., None], q)
    return q, best.sum(2) * scale.square()
