"""4-bit weights, int8 activations: QServe's linear layer, QoQ's format (Lin et al., 2024), with exact zero points.

    per group of 128 columns:  w[n, k] = (q[n, k] - zero[g, n]) * group_scale[g, n] * scale[n]       g = k / 128
    per channel:               w[n, k] = (q[n, k] - zero[n]) * scale[n]
    y[m, n] = (sum over k of q_x[m, k] * w[n, k] / scale[n]) * scale_x[m] * scale[n] + bias[n]

    q              0..15, packed as kernels/w4a16.py's in groups of 128: low bits q[j], high bits q[j + 64]
    zero           0..15
    group_scale    1..16; (q - zero) * group_scale lies within int8, so that every weight is also an int8 weight
    q_x, scale_x   kernels/int8_rows.py's

The sums are int32 and exact, so the number of rows, the tiles and the splits of k do not change y; it equals the result of
kernels/w8a8.py for `as_int8(weight)`.
(QServe corrects for a channel's zero with the sum of the activations before they were rounded, which is not exact.)

A group is two products, of its low and of its high bits, and the kernel computes y^T = W x^T, both as in kernels/w4a16.py.
Four weights are unpacked at once in a word (in PTX, since Triton computes bytes one by one): t = (q - zero) * group_scale + 128
lies within 0..255, so that one multiply-add makes four of them without a carry, and t ^ 0x80 is the int8 weight. The loop then
has 2.0 instructions a weight (sm_90, 16 rows) and no PRMT; unpacking byte by byte it has 7.2, and 360 PRMT.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import w8a8
from kernels.common.gemm_tiles import GroupTiles as GemmTiles
from kernels.common.gemm_tiles import splits_of, tiles_of
from kernels.common.triton_runtime import INTERPRETED, Variant, architecture_of, jit, runs_on, tl
from kernels.int8_rows import GROUP, Int8Rows
from kernels.w4a16 import pack, unpack
from kernels.w8a8 import MAX_K, add_parts, scaled

# (m, n, k, per group)
CASES = [
    (1, 64, 256, True),
    (3, 40, 128, False),
    (16, 130, 2048, True),
    (17, 72, 2048, False),
    (70, 64, 384, True),
    (260, 72, 256, False),
    (0, 64, 128, True),
]

MAX_8 = 119  # QoQ's protective range: half a 4-bit step, at most 8, more still fits int8
MAX_GROUP_SCALE = 16

# $2 holds four bytes of q, $3 group_scale, $7 zero. $0 and $1 get four int8 weights each, from the low and from the high bits.
GROUP_ASM = """{
    .reg .b32 offset, t;
    mul.lo.u32 t, $3, $7;
    mad.lo.u32 offset, t, 0xFEFEFEFF, 0x80808080;
    and.b32 t, $2, 0x0F0F0F0F;
    mad.lo.u32 t, t, $3, offset;
    xor.b32 $0, t, 0x80808080;
    shr.u32 t, $2, 4;
    and.b32 t, t, 0x0F0F0F0F;
    mad.lo.u32 t, t, $3, offset;
    xor.b32 $1, t, 0x80808080;
}"""
CHANNEL_ASM = """{
    .reg .b32 t;
    and.b32 $0, $2, 0x0F0F0F0F;
    shr.u32 t, $2, 4;
    and.b32 $1, t, 0x0F0F0F0F;
}"""


class Weight4A8(NamedTuple):
    packed: Tensor  # uint8 [n, k / 2]
    scale: Tensor  # float32 [n]
    group_scales: Tensor | None  # int8 [k / GROUP, n], 1..16; None: per channel
    zeros: Tensor  # uint8 [k / GROUP, n], or [1, n] per channel; 0..15


# Architecture -> bucket of rows (gemm_tiles.py; None: more) -> tiles. A step along k is one group.
TILES = {
    80: {
        16: GemmTiles(16, 128, 4, 4),
        64: GemmTiles(64, 128, 4, 3),
        256: GemmTiles(64, 128, 4, 3),
        None: GemmTiles(128, 128, 8, 3),
    },
    90: {
        16: GemmTiles(16, 128, 4, 5),
        64: GemmTiles(64, 128, 4, 4),
        256: GemmTiles(128, 128, 4, 3),
        None: GemmTiles(128, 128, 4, 3),
    },
    100: {
        16: GemmTiles(16, 128, 4, 5),
        64: GemmTiles(64, 128, 4, 4),
        256: GemmTiles(64, 128, 4, 4),
        None: GemmTiles(128, 128, 8, 3),
    },
}


def quantize(weight: Tensor, per_group: bool) -> Weight4A8:
    """Quantise weight [n, k], of any float type with k a multiple of 128, to the nearest. Zeros stay zeros."""
    n, k = weight.shape
    if k % GROUP:
        raise ValueError(
            f"a W4A8 weight has columns in groups of {GROUP}, this one has {k}: pad it, or keep it in 8 bits"
        )
    w, group_scales = weight.float(), None
    if per_group:
        scale = w.abs().amax(1) / MAX_8
        w = (w / _divisor(scale)[:, None]).unflatten(1, (-1, GROUP))  # its unit is that of the int8 weight
        step = _better_step(w)
        group_scales = step.to(torch.int8).T.contiguous()
    else:
        w = w[:, None]
        step = _spread(w) / 15
        scale = step[:, 0]
    q, zero = _rounded(w, step)
    return Weight4A8(
        pack((q + zero[:, :, None]).to(torch.uint8).flatten(1), GROUP),
        scale,
        group_scales,
        zero.to(torch.uint8).T.contiguous(),
    )


def _better_step(w: Tensor) -> Tensor:
    """The whole steps [n, groups] of w [n, groups, columns]: the exact step rounded to the side with less squared error."""
    fitting = _spread(w) / 15
    fine, coarse = fitting.floor().clamp(min=1), fitting.ceil().clamp(1, MAX_GROUP_SCALE)
    fine_error, coarse_error = ((_rounded(w, s)[0] * s[:, :, None] - w).square().sum(2) for s in (fine, coarse))
    return torch.where(fine_error < coarse_error, fine, coarse)


def _rounded(w: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds w [n, groups, columns] by step [n, groups]; returns q - zero, shaped like w, and zero [n, groups], all whole."""
    w = w / _divisor(step)[:, :, None]
    zero = (-w.amin(2).clamp(max=0)).round().clamp(max=15)[:, :, None]
    return torch.minimum(torch.maximum(w.round(), -zero), 15 - zero), zero[:, :, 0]


def _spread(w: Tensor) -> Tensor:
    """The width of the range of each group's values and 0, [n, groups], of w [n, groups, columns]."""
    return w.amax(2).clamp(min=0) - w.amin(2).clamp(max=0)


def _divisor(step: Tensor) -> Tensor:
    return torch.where(step > 0, step, torch.inf)


def dequantize(weight: Weight4A8) -> Tensor:
    """The weight as float32 [n, k]."""
    q, scale = as_int8(weight)
    return q.float() * scale[:, None]


def as_int8(weight: Weight4A8) -> tuple[Tensor, Tensor]:
    """The same weight in the format of kernels/w8a8.py, exactly: int8 [n, k] and scales float32 [n]."""
    q = unpack(weight.packed, GROUP).to(torch.int8).unflatten(1, (-1, GROUP))
    q = q - weight.zeros.to(torch.int8).T[:, :, None]
    if weight.group_scales is not None:
        q = q * weight.group_scales.T[:, :, None]
    return q.flatten(1), weight.scale


def reference(x: Int8Rows, weight: Weight4A8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Like `w4a8`, by the reference of kernels/w8a8.py."""
    return w8a8.reference(x, *as_int8(weight), bias, dtype)


def w4a8(x: Int8Rows, weight: Weight4A8, bias: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Multiplies x [m, k] by weight [n, k] in contiguous tensors, adds bias [n], and returns [m, n] in dtype.

    Raises ValueError for shapes that do not fit.
    """
    (m, k), n = x.q.shape, len(weight.packed)
    if k != 2 * weight.packed.shape[1]:
        raise ValueError(f"x has {k} columns, the weight {2 * weight.packed.shape[1]}: they must be the same")
    if k > MAX_K:
        raise ValueError(f"k = {k}: int32 sums are exact up to {MAX_K} only")
    if not runs_on(x.q):
        return reference(x, weight, bias, dtype)
    out = torch.empty(m, n, dtype=dtype, device=x.q.device)
    if m == 0:
        return out
    tiles = _tiles(architecture_of(x.q, TILES), m)
    groups = k // GROUP
    splits = _splits(tiles, m, n, groups)
    parts = torch.empty(splits, m, n, dtype=torch.int32, device=out.device) if splits > 1 else None
    grid = (-(-m // tiles.block_m), -(-n // tiles.block_n), splits)
    _w4a8_kernel[grid](
        x.q.contiguous(),
        x.scale,
        x.sums,
        weight.packed,
        weight.scale,
        weight.group_scales,
        weight.zeros,
        bias,
        out,
        parts,
        m,
        n,
        groups,
        groups // splits,
        IN_WORDS=_in_words(tiles, n),
        ASM=None if INTERPRETED else _asm(weight.group_scales is not None),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts is not None:
        add_parts(parts, x.scale, weight.scale, bias, out)
    return out


def _in_words(tiles: GemmTiles, n: int) -> bool:
    """True if a group's scales and zeros are read in words of four bytes, because single bytes cannot be copied asynchronously.

    With fewer features than threads, reading words would make the weights pass through shared memory.
    """
    return n % 4 == 0 and tiles.block_n >= 32 * tiles.num_warps


def _asm(per_group: bool) -> str:
    return GROUP_ASM if per_group else CHANNEL_ASM


@jit(do_not_specialize=["m"])
def _w4a8_kernel(
    x,  # [m, k] int8
    scale_x,  # [m] float32
    sums_x,  # [m, k / 128] int32
    packed,  # [n, k / 2] uint8
    scale_w,  # [n] float32
    group_scales,  # [k / 128, n] int8, or None: per channel
    zeros,  # [k / 128, n] uint8, or [1, n] per channel
    bias,  # [n], or None
    out,  # [m, n]
    parts,  # [splits, m, n] int32, or None: without splits
    m,
    n,
    groups,  # k / 128
    groups_split,  # groups of a split: splits * groups_split = groups
    IN_WORDS: tl.constexpr,
    ASM: tl.constexpr,  # None in the interpreter
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * groups_split
    columns = tl.arange(0, 64)
    # Rows and features past the end read the last one again, so loads need no mask; they are not stored.
    held_rows, held = tl.minimum(rows, m - 1), tl.minimum(features, n - 1)
    x_rows = x + held_rows.to(tl.int64)[:, None] * (groups * 128) + columns[None, :]
    w_rows = packed + held.to(tl.int64)[:, None] * (groups * 64) + columns[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32)
    for step in range(0, groups_split):
        group = first + step
        q = tl.load(w_rows + group * 64)
        x_low = tl.load(x_rows + group * 128)
        x_high = tl.load(x_rows + group * 128 + 64)
        if group_scales is not None:
            scale = _bytes(group_scales, group, features, n, IN_WORDS)
            zero = _bytes(zeros, group, features, n, IN_WORDS)
            low, high = _group_weights(q, scale[:, None], zero[:, None], ASM)
        else:
            low, high = _nibbles(q, ASM)
        total = tl.dot(low, tl.trans(x_low), total, out_dtype=tl.int32)
        total = tl.dot(high, tl.trans(x_high), total, out_dtype=tl.int32)
    if group_scales is None:
        row_sums = tl.zeros((BLOCK_M,), tl.int32)
        sums = sums_x + held_rows.to(tl.int64) * groups + first
        for start in range(0, groups_split, 16):
            steps = start + tl.arange(0, 16)
            row_sums += tl.sum(tl.load(sums[:, None] + steps[None, :], (steps < groups_split)[None, :], other=0), 1)
        total -= tl.load(zeros + held).to(tl.int32)[:, None] * row_sums[None, :]
    total = tl.trans(total)
    mask = (rows < m)[:, None] & (features < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + features[None, :]
    if parts is not None:
        tl.store(parts + tl.program_id(2).to(tl.int64) * m * n + at, total, mask)
    else:
        y = scaled(total, tl.load(scale_x + held_rows)[:, None], scale_w, bias, features, n)
        tl.store(out + at, y.to(out.dtype.element_ty), mask)


@jit
def _bytes(table, group, features, n, IN_WORDS: tl.constexpr):
    """A group's row of a table [k / 128, n] of bytes, as int32 [BLOCK_N]."""
    last = tl.minimum(features, n - 1)
    if IN_WORDS:
        words = tl.load(table.to(tl.pointer_type(tl.int32)) + group.to(tl.int64) * (n // 4) + last // 4)
        return (words >> (features % 4 * 8)) & 255
    else:
        return tl.load(table + group.to(tl.int64) * n + last).to(tl.int32)


@jit
def _group_weights(q, scale, zero, ASM: tl.constexpr):
    """The int8 weights (low - zero) * scale, (high - zero) * scale of q uint8 [BLOCK_N, 64]; scale, zero int32 [BLOCK_N, 1]."""
    if ASM is None:
        low = ((q & 15).to(tl.int32) - zero) * scale
        high = ((q >> 4).to(tl.int32) - zero) * scale
        return low.to(tl.int8), high.to(tl.int8)
    else:
        scale, _ = tl.broadcast(scale, q)
        zero, _ = tl.broadcast(zero, q)
        # The four bytes of a word are of one row, so scale and zero are repeated four times.
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r,r,r,r,r,r,r,r,r", [q, scale, zero], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )


@jit
def _nibbles(q, ASM: tl.constexpr):
    """Returns the low bits and the high bits of q uint8 [BLOCK_N, 64], each int8."""
    if ASM is None:
        return (q & 15).to(tl.int8), (q >> 4).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [q], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)


def _tiles(architecture: int, m: int) -> GemmTiles:
    return tiles_of(TILES[architecture], m)


def _splits(tiles: GemmTiles, m: int, n: int, groups: int) -> int:
    """The number of splits of k: a power of two that divides the groups."""
    return splits_of(m, tiles, n, groups, even=True)


def variants() -> dict[str, Variant]:
    types = {"x": "*i8", "scale_x": "*fp32", "sums_x": "*i32", "packed": "*u8", "scale_w": "*fp32", "zeros": "*u8"}
    types |= {"out": "*bf16"} | dict.fromkeys(("m", "n", "groups", "groups_split"), "i32")
    shapes = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    made = {}
    # (layer, m, per group, architectures, of the first of which the tiles are)
    for name, m, per_group, architectures in (
        ("gate_up", 16, True, (90, 80, 100)),
        ("qkv", 16, False, (90, 80, 100)),
        ("down", 64, True, (90, 80, 100)),
        ("gate_up", 256, True, (90,)),
        ("gate_up", 256, False, (90,)),
        ("down", 256, True, (90,)),
        ("gate_up", 8192, True, (80, 100)),
        ("gate_up", 8192, False, (80, 100)),
    ):
        n, k = shapes[name]
        tiles = _tiles(architectures[0], m)
        present = {"group_scales": "*i8"} if per_group else {}
        if _splits(tiles, m, n, k // GROUP) > 1:
            present["parts"] = "*i32"
        constants: dict[str, object] = dict.fromkeys({"group_scales", "parts", "bias"} - present.keys())
        constants |= {
            "IN_WORDS": _in_words(tiles, n),
            "ASM": _asm(per_group),
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
        }
        made[f"{name}-{m}-{'group' if per_group else 'channel'}"] = Variant(
            _w4a8_kernel,
            types | present,
            constants,
            tiles.num_warps,
            tiles.num_stages,
            ("n",),
            {80: ("IMMA", "LDGSTS"), 90: ("IGMMA", "LDGSTS"), 100: ("IMMA", "LDGSTS")},
            architectures,
        )
    return made
