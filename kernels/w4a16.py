"""4-bit weights in groups along k, 16-bit activations: AWQ's (Lin et al., 2023) and GPTQ's (Frantar et al., 2022) linear layer.

    w[n, k] = (q[n, k] - zero[k / group, n]) * scale[k / group, n]       rounded to x's type; the zero is 8 without zero points
    y[m, n] = sum over k of x[m, k] * w[n, k], in float32, + bias[n]     rounded to x's type

    packed   uint8 [n, k / 2]          byte j of a group: q[j] in its low, q[j + group / 2] in its high bits
    scales   [k / group, n]            bfloat16 or float16, x's type
    zeros    like scales, or None      whole numbers 0..16

A group is 128, 64 or 32 columns. The low bits hold its first half and the high bits its second half, so that a group is two
matrix products and unpacking exchanges no neighbours. The kernel computes y^T = W x^T, because wgmma can take only its left
operand from registers, where the weights are unpacked, and accepts few tokens only as its right operand. A 4-bit number becomes
a float by setting bits: a float16 0x6400 | q is 1024 + q, a bfloat16 0x4300 | q is 128 + q, and subtracting 1024 + zero is exact.
Several bytes are unpacked at once, in PTX: two on sm_90, where wgmma's layout gives a thread two neighbours, else four
(kernels/common/kv_format.py, whose float16 is 64 + q). With 16 rows the loop has 3.4 instructions a weight on sm_90 and 3.3 on
sm_80, instead of 5.2 and 6.6.

Few rows do not fill a GPU with tiles. Then k is split over more programs (split-K: Hoque et al., arXiv 2402.00025), each of which
writes float32 sums to a buffer of its own, and a second kernel adds them in order. Without atomics, results are reproducible.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common.gemm_tiles import GroupTiles as GemmTiles
from kernels.common.gemm_tiles import splits_of, tiles_of
from kernels.common.kv_format import floats_of_int4, unpacking
from kernels.common.triton_runtime import INTERPRETED, Variant, architecture_of, jit, runs_on, tl

# (m, n, k, group, zero points)
CASES = [
    (1, 64, 256, 128, True),
    (3, 40, 128, 64, False),
    (17, 72, 96, 32, True),
    (16, 130, 2048, 128, False),
    (70, 64, 384, 64, True),
    (260, 72, 128, 128, False),
    (0, 64, 128, 128, True),
]

GROUPS = (128, 64, 32)
SYMMETRIC_ZERO = 8
# dtype -> (the bits of two floats whose lowest mantissa bit is worth 1, the value of that float)
MAGIC = {torch.float16: ("0x64006400", 1024), torch.bfloat16: ("0x43004300", 128)}
# $2 holds two bytes of q. $0 and $1 get two floats each, from the low and from the high bits.
PAIR_ASM = """{
    .reg .b32 t;
    cvt.u32.u16 t, $2;
    prmt.b32 t, t, 0, 0x4140;
    lop3.b32 $0, t, 0x000f000f, MAGIC, 0xea;
    shr.u32 t, t, 4;
    lop3.b32 $1, t, 0x000f000f, MAGIC, 0xea;
}"""
REDUCED_AT_ONCE = 1024  # features of a program that adds splits


class Weight4(NamedTuple):
    packed: Tensor  # uint8 [n, k / 2]
    scales: Tensor  # [k / group, n]
    zeros: Tensor | None  # like scales
    group: int  # columns

    def to(self, dtype: torch.dtype) -> Weight4:
        """The same weight with scales and zeros in `dtype`, which is x's."""
        zeros = None if self.zeros is None else self.zeros.to(dtype)
        return self._replace(scales=self.scales.to(dtype), zeros=zeros)


# Architecture -> bucket of rows (gemm_tiles.py; None: more) -> tiles. A step along k is one group.
TILES = {
    80: {
        16: GemmTiles(16, 128, 4, 4),
        64: GemmTiles(64, 128, 4, 3),
        256: GemmTiles(64, 128, 4, 3),
        None: GemmTiles(128, 128, 8, 2),
    },
    90: {
        16: GemmTiles(16, 128, 4, 3),
        64: GemmTiles(64, 128, 4, 3),
        256: GemmTiles(128, 128, 4, 3),
        None: GemmTiles(128, 128, 4, 3),
    },
    100: {
        16: GemmTiles(16, 128, 4, 5),
        64: GemmTiles(64, 128, 4, 4),
        256: GemmTiles(128, 64, 4, 3),
        None: GemmTiles(128, 128, 8, 3),
    },
}


def pack(q: Tensor, group: int) -> Tensor:
    """Packs q uint8 [n, k], 0..15, to uint8 [n, k / 2]."""
    low, high = q.unflatten(1, (-1, 2, group // 2)).unbind(2)
    packed: Tensor = low | high << 4
    return packed.flatten(1)


def unpack(packed: Tensor, group: int) -> Tensor:
    """The inverse of `pack`."""
    halves = packed.unflatten(1, (-1, group // 2))
    return torch.stack((halves & 15, halves >> 4), 2).flatten(1)


def quantize(weight: Tensor, group: int, zero_points: bool = True, dtype: torch.dtype = torch.bfloat16) -> Weight4:
    """Quantise weight [n, k], of any float type, to the nearest; scales are in `dtype`. Groups of zeros stay zeros."""
    grouped = weight.float().unflatten(1, (-1, group))  # [n, groups, group]
    if zero_points:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = ((high - low) / 15).to(dtype)
    else:
        scale = (grouped.abs().amax(2) / 7).to(dtype)
    divisor = torch.where(scale > 0, scale.float(), torch.inf)
    zero = (-low / divisor).round().clamp(0, 15) if zero_points else torch.full_like(divisor, SYMMETRIC_ZERO)
    q = ((grouped / divisor[:, :, None]).round() + zero[:, :, None]).clamp(0, 15).to(torch.uint8)
    zeros = zero.to(dtype).T.contiguous() if zero_points else None
    return Weight4(pack(q.flatten(1), group), scale.T.contiguous(), zeros, group)


def dequantize(weight: Weight4) -> Tensor:
    """The weight as float32 [n, k], not rounded to x's type."""
    q: Tensor = unpack(weight.packed, weight.group).float().unflatten(1, (-1, weight.group))
    zero = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.float().T[:, :, None]
    return ((q - zero) * weight.scales.float().T[:, :, None]).flatten(1)


def reference(x: Tensor, weight: Weight4, bias: Tensor | None) -> Tensor:
    """Multiplies x [m, k] by the weight; returns [m, n] in x's type."""
    y = x.float() @ dequantize(weight).to(x.dtype).float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def w4a16(x: Tensor, weight: Weight4, bias: Tensor | None = None) -> Tensor:
    """Multiplies x [m, k] bfloat16 or float16 by the weight, adds bias [n], and returns [m, n] in x's type.

    The weight's tensors are contiguous, and its scales have x's type.
    """
    if x.dtype not in MAGIC or not runs_on(x):
        return reference(x, weight, bias)
    if weight.scales.dtype != x.dtype or weight.group not in GROUPS:
        raise ValueError(f"scales are {weight.scales.dtype} in groups of {weight.group}, x is {x.dtype}")
    (m, k), n = x.shape, len(weight.packed)
    if k % weight.group or weight.packed.shape[1] != k // 2:
        raise ValueError(f"x has {k} columns, the weight {2 * weight.packed.shape[1]} in groups of {weight.group}")
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    architecture = architecture_of(x, TILES)
    tiles = _tiles(architecture, m, weight.group)
    groups = k // weight.group
    splits = _splits(tiles, m, n, groups)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else None
    grid = (-(-m // tiles.block_m), -(-n // tiles.block_n), splits)
    _w4a16_kernel[grid](
        x.contiguous(),
        weight.packed,
        weight.scales,
        weight.zeros,
        bias,
        out,
        parts,
        m,
        n,
        groups,
        groups // splits,
        GROUP=weight.group,
        **_unpacking(architecture, x.dtype, not INTERPRETED),
        IN_WORDS=_in_words(tiles, n),
        IN_FLOAT32=INTERPRETED and x.dtype == torch.bfloat16,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts is not None:
        _reduce_kernel[(m, -(-n // REDUCED_AT_ONCE))](parts, bias, out, m, n, SPLITS=splits, BLOCK_N=REDUCED_AT_ONCE)
    return out


@jit(do_not_specialize=["m"])
def _w4a16_kernel(
    x,  # [m, k]
    packed,  # [n, k / 2] uint8
    scales,  # [k / GROUP, n] of x's type
    zeros,  # like scales, or None
    bias,  # [n], or None
    out,  # [m, n]
    parts,  # [splits, m, n] float32, or None: without splits
    m,
    n,
    groups,  # k / GROUP
    groups_split,  # groups of a split: splits * groups_split = groups
    GROUP: tl.constexpr,
    ASM: tl.constexpr,  # None in the interpreter
    IN_PAIRS: tl.constexpr,  # True if ASM takes two bytes, not four
    BIAS: tl.constexpr,
    IN_WORDS: tl.constexpr,
    IN_FLOAT32: tl.constexpr,  # compute in float32, because the interpreter's bfloat16 is wrong
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    HALF: tl.constexpr = GROUP // 2
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * groups_split
    columns = tl.arange(0, HALF)
    # Tokens and features past the end read the last one again, so loads need no mask; they are not stored.
    held = tl.minimum(features, n - 1)
    x_rows = x + tl.minimum(tokens, m - 1).to(tl.int64)[:, None] * (groups * GROUP) + columns[None, :]
    rows = packed + held.to(tl.int64)[:, None] * (groups * HALF) + columns[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(0, groups_split):
        group = first + step
        q = tl.load(rows + group * HALF)
        x_low = tl.load(x_rows + group * GROUP)
        x_high = tl.load(x_rows + group * GROUP + HALF)
        scale = _parameters(scales, group, features, n, IN_WORDS)
        if zeros is not None:
            zero = _parameters(zeros, group, features, n, IN_WORDS)
        else:
            zero = tl.full((BLOCK_N,), 8, tl.float32).to(scale.dtype)
        if IN_FLOAT32:
            low, high = (q & 15).to(tl.float32), (q >> 4).to(tl.float32)
            scale, offset = scale.to(tl.float32), zero.to(tl.float32)
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        else:
            low, high = _floats(q, scale.dtype, ASM, IN_PAIRS)
            offset = (zero.to(tl.float32) + BIAS).to(scale.dtype)  # this sum is exact, and so is the difference below
        low = (low - offset[:, None]) * scale[:, None]
        high = (high - offset[:, None]) * scale[:, None]
        total = tl.dot(low, tl.trans(x_low), total, input_precision="ieee")
        total = tl.dot(high, tl.trans(x_high), total, input_precision="ieee")
    mask = (features < n)[:, None] & (tokens < m)[None, :]
    at = tokens.to(tl.int64)[None, :] * n + features[:, None]
    if parts is not None:
        tl.store(parts + tl.program_id(2).to(tl.int64) * m * n + at, total, mask)
    else:
        if bias is not None:
            total += tl.load(bias + held).to(tl.float32)[:, None]
        tl.store(out + at, total.to(out.dtype.element_ty), mask)


@jit
def _parameters(table, group, features, n, IN_WORDS: tl.constexpr):
    """A group's row of a table [k / GROUP, n] of 16-bit floats, as [BLOCK_N]."""
    last = tl.minimum(features, n - 1)
    if IN_WORDS:
        words = tl.load(table.to(tl.pointer_type(tl.int32)) + group.to(tl.int64) * (n // 2) + last // 2)
        return (words >> (features % 2 * 16)).to(tl.int16).to(table.dtype.element_ty, bitcast=True)
    else:
        return tl.load(table + group.to(tl.int64) * n + last)


@jit
def _floats(q, DTYPE: tl.constexpr, ASM: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Returns the low bits and the high bits of q uint8 as floats, each plus BIAS."""
    if not IN_PAIRS:
        return floats_of_int4(q, DTYPE, ASM)
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(ASM, "=r,=r,h", [q], (tl.float16, tl.float16), True, 2)
    else:
        return tl.inline_asm_elementwise(ASM, "=r,=r,h", [q], (tl.bfloat16, tl.bfloat16), True, 2)


@jit(do_not_specialize=["m"])
def _reduce_kernel(
    parts,  # [splits, m, n] float32
    bias,  # [n], or None
    out,  # [m, n]
    m,
    n,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = features < n
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * m + row) * n + features, mask, other=0)
    if bias is not None:
        total += tl.load(bias + features, mask, other=0).to(tl.float32)
    tl.store(out + row * n + features, total.to(out.dtype.element_ty), mask)


def _tiles(architecture: int, m: int, group: int) -> GemmTiles:
    tiles = tiles_of(TILES[architecture], m)
    # If a thread copied a whole row of 16 bytes, the weights would pass through shared memory instead of staying in registers.
    return tiles._replace(block_n=16 * tiles.num_warps) if group == 32 else tiles


def _in_words(tiles: GemmTiles, n: int) -> bool:
    """True if a group's scales and zeros are read in words, because single 16-bit values cannot be copied asynchronously.

    With fewer features than threads, words would take the weights out of the registers and through shared memory. With 128
    tokens, words leave sm_90 shared memory for one program a multiprocessor, not two.
    """
    return n % 2 == 0 and tiles.block_n >= 32 * tiles.num_warps and tiles.block_m < 128


def _unpacking(architecture: int, dtype: torch.dtype, compiled: bool) -> dict[str, object]:
    """The constexpr arguments of the kernel."""
    words, in_pairs = unpacking(dtype, 4, compiled), compiled and architecture == 90
    asm = PAIR_ASM.replace("MAGIC", MAGIC[dtype][0]) if in_pairs else words.asm
    return {"ASM": asm, "IN_PAIRS": in_pairs, "BIAS": MAGIC[dtype][1] if in_pairs else words.bias}


def _splits(tiles: GemmTiles, m: int, n: int, groups: int) -> int:
    """The number of splits of k: a power of two that divides the groups."""
    return splits_of(m, tiles, n, groups, even=True)


# (layer, m, group, zero points)
_VARIANTS = (
    ("gate_up", 16, 128, True),
    ("qkv", 16, 128, False),
    ("down", 64, 128, True),
    ("gate_up", 64, 32, True),
    ("gate_up", 256, 128, True),
    ("down", 256, 128, True),
    ("gate_up", 8192, 128, True),
)


def variants() -> dict[str, Variant]:
    """One variant for each architecture, because each has its own tiles."""
    made = {
        f"{layer}-{m}-g{group}-sm{architecture}": _variant(architecture, layer, m, group, zero_points)
        for architecture in TILES
        for layer, m, group, zero_points in _VARIANTS
    }
    reduced = {"parts": "*fp32", "bias": "*bf16", "out": "*bf16", "m": "i32", "n": "i32"}
    constants = {"SPLITS": 2, "BLOCK_N": REDUCED_AT_ONCE}
    made["reduce"] = Variant(_reduce_kernel, reduced, constants, divisible=("n",))
    return made


def _variant(architecture: int, layer: str, m: int, group: int, zero_points: bool) -> Variant:
    n, k = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}[layer]
    tiles = _tiles(architecture, m, group)
    types = {"x": "*bf16", "packed": "*u8", "scales": "*bf16", "out": "*bf16"}
    types |= dict.fromkeys(("m", "n", "groups", "groups_split"), "i32")
    if zero_points:
        types["zeros"] = "*bf16"
    if _splits(tiles, m, n, k // group) > 1:
        types["parts"] = "*fp32"
    constants: dict[str, object] = dict.fromkeys({"zeros", "parts", "bias"} - types.keys())
    constants |= {"GROUP": group, "IN_WORDS": _in_words(tiles, n), "IN_FLOAT32": False}
    constants |= _unpacking(architecture, torch.bfloat16, True)
    constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n}
    product = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}[architecture]
    expected = {architecture: (product, "LDGSTS")}
    of_tiles = tiles.num_warps, tiles.num_stages
    return Variant(_w4a16_kernel, types, constants, *of_tiles, ("n",), expected, (architecture,))
