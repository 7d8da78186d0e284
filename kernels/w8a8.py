"""int8 linear layer: int8 activations with a scale for each row, int8 weights with a scale for each output feature.

    y[m, n] = (sum over k of q_x[m, k] * q_w[n, k]) * scale_x[m] * scale_w[n] + bias[n]

    q_x, scale_x   int8 [m, k], float32 [m]       kernels/int8_rows.py's, of `quantize` or of what made x
    q_w, scale_w   int8 [n, k], float32 [n]       row-major, so that k is contiguous in both operands: what integer MMA wants
    y              [m, n] bfloat16, float16 or float32

The format is SmoothQuant's (Xiao et al., 2023). The sums are int32 and exact for k <= 131071 in any order, so the number of rows,
the tiles and the splits of k do not change a bit of y. Few rows do not fill a GPU with tiles; k is then split over more
programs (split-K: Hoque et al., arXiv 2402.00025), each of which writes its int32 sums to a buffer of its own, and a second
kernel adds them.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import int8_rows
from kernels.common.gemm_tiles import splits_of, tiles_of
from kernels.common.triton_runtime import Variant, architecture_of, jit, next_power_of_two, runs_on, tl
from kernels.int8_rows import Int8Rows, int8_scales, store_int8

# (m, n, k)
CASES = [(1, 64, 128), (3, 40, 100), (16, 200, 1024), (17, 72, 256), (65, 130, 192), (300, 130, 48), (0, 64, 128)]
ROWS_CASES = [(1, 1), (5, 64), (17, 100), (3, 1000), (0, 64)]  # shapes of quantize's x

MAX_K = 131_071  # 128 * 128 * k stays within int32


class W8A8Tiles(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Architecture -> bucket of rows (gemm_tiles.py; None: more) -> tiles. Those of 80 fit the 99 KiB of shared memory of 86 and 89.
TILES = {
    80: {
        16: W8A8Tiles(16, 64, 128, 4, 4),
        64: W8A8Tiles(64, 64, 128, 4, 4),
        256: W8A8Tiles(64, 128, 128, 4, 3),
        None: W8A8Tiles(128, 128, 128, 8, 3),
    },
    90: {
        16: W8A8Tiles(16, 64, 256, 4, 4),
        64: W8A8Tiles(64, 64, 128, 4, 5),
        256: W8A8Tiles(64, 128, 128, 4, 4),
        None: W8A8Tiles(128, 256, 128, 8, 3),
    },
    100: {
        16: W8A8Tiles(16, 64, 256, 4, 4),
        64: W8A8Tiles(64, 64, 128, 4, 5),
        256: W8A8Tiles(64, 128, 128, 4, 4),
        None: W8A8Tiles(128, 128, 128, 8, 3),
    },
}


def reference(x: Int8Rows, q_w: Tensor, scale_w: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Like `w8a8`, in float64, in which the sums of integers are exact."""
    total = (x.q.double() @ q_w.double().T).float()
    y = total * x.scale[:, None] * scale_w
    return (y if bias is None else y + bias.float()).to(dtype)


def w8a8(
    x: Int8Rows,
    q_w: Tensor,
    scale_w: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiplies x [m, k] by q_w int8 [n, k], contiguous, with scale_w float32 [n]; adds bias [n]; returns [m, n] in dtype."""
    (m, k), n = x.q.shape, len(q_w)
    if k > MAX_K:
        raise ValueError(f"k = {k}: int32 sums are exact up to {MAX_K} only")
    if not runs_on(x.q):
        return reference(x, q_w, scale_w, bias, dtype)
    out = torch.empty(m, n, dtype=dtype, device=q_w.device)
    if m == 0:
        return out
    tiles = _tiles(architecture_of(q_w, TILES), m)
    splits = _splits(tiles, m, n, k)
    k_split = -(-k // (splits * tiles.block_k)) * tiles.block_k
    parts = torch.empty(splits, m, n, dtype=torch.int32, device=q_w.device) if splits > 1 else None
    grid = (-(-m // tiles.block_m), -(-n // tiles.block_n), splits)
    _w8a8_kernel[grid](
        x.q.contiguous(),
        x.scale,
        q_w,
        scale_w,
        bias,
        out,
        parts,
        m,
        n,
        k,
        k_split,
        EVEN_K=k_split * splits == k,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts is not None:
        add_parts(parts, x.scale, scale_w, bias, out)
    return out


def add_parts(parts: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Adds the splits: parts int32 [splits, m, n], scale_x float32 [m], scale_w float32 [n], bias [n] -> out [m, n]."""
    splits, m, n = parts.shape
    grid = (m, -(-n // REDUCED_AT_ONCE))
    _reduce_kernel[grid](parts, scale_x, scale_w, bias, out, m, n, SPLITS=splits, BLOCK_N=REDUCED_AT_ONCE)


def quantize(x: Tensor) -> Int8Rows:
    """Quantises x [rows, k] to int8 rows."""
    if not runs_on(x):
        return int8_rows.reference(x)
    x = x.contiguous()
    rows, k = x.shape
    made = int8_rows.empty(rows, k, x.device)
    if rows:
        block = next_power_of_two(k)
        _quantize_kernel[(rows,)](x, *made, k, BLOCK=block, num_warps=_num_warps(block))
    return made


@jit(do_not_specialize=["m"])
def _w8a8_kernel(
    q_x,  # [m, k] int8
    scale_x,  # [m] float32
    q_w,  # [n, k] int8
    scale_w,  # [n] float32
    bias,  # [n], or None
    out,  # [m, n]
    parts,  # [splits, m, n] int32, or None: without splits
    m,
    n,
    k,
    k_split,  # columns of a split: a multiple of BLOCK_K
    EVEN_K: tl.constexpr,  # True if k = splits * k_split
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(2) * k_split
    columns = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one again, so loads need no mask; they are not stored.
    x_rows = q_x + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * k + first + columns[None, :]
    w_rows = q_w + tl.minimum(features, n - 1).to(tl.int64)[:, None] * k + first + columns[None, :]
    # wgmma needs 64 rows in its left operand: with fewer tokens the weights are the left operand.
    SWAP: tl.constexpr = BLOCK_M < 64
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for start in range(0, k_split, BLOCK_K):
        if EVEN_K:
            x_tile = tl.load(x_rows + start)
            w_tile = tl.load(w_rows + start)
        else:
            mask = (first + start + columns < k)[None, :]
            x_tile = tl.load(x_rows + start, mask, other=0)
            w_tile = tl.load(w_rows + start, mask, other=0)
        if SWAP:
            total = tl.dot(w_tile, tl.trans(x_tile), total, out_dtype=tl.int32)
        else:
            total = tl.dot(x_tile, tl.trans(w_tile), total, out_dtype=tl.int32)
    if SWAP:
        total = tl.trans(total)
    mask = (rows < m)[:, None] & (features < n)[None, :]
    at = rows.to(tl.int64)[:, None] * n + features[None, :]
    if parts is not None:
        tl.store(parts + tl.program_id(2).to(tl.int64) * m * n + at, total, mask)
    else:
        x_scale = tl.load(scale_x + rows, rows < m, other=0)
        y = scaled(total, x_scale[:, None], scale_w, bias, features, n)
        tl.store(out + at, y.to(out.dtype.element_ty), mask)


@jit(do_not_specialize=["m"])
def _reduce_kernel(
    parts,  # [splits, m, n] int32
    scale_x,  # [m] float32
    scale_w,  # [n] float32
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
    total = tl.zeros((BLOCK_N,), tl.int32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + (split * m + row) * n + features, mask, other=0)
    y = scaled(total[None, :], tl.load(scale_x + row), scale_w, bias, features, n)
    tl.store(out + row * n + features[None, :], y.to(out.dtype.element_ty), mask[None, :])


@jit
def scaled(total, x_scale, scale_w, bias, features, n):
    """Scales total int32 [rows, features] by x_scale [rows, 1] or a scalar; returns float32. Shared, for equal bits."""
    y = total.to(tl.float32) * x_scale * tl.load(scale_w + features, features < n, other=0)[None, :]
    if bias is not None:
        y += tl.load(bias + features, features < n, other=0).to(tl.float32)[None, :]
    return y


@jit
def _quantize_kernel(
    x,  # [rows, k]
    q,  # [rows, k] int8
    scales,  # [rows] float32
    sums,  # [rows, ceil(k / 128)] int32
    k,
    BLOCK: tl.constexpr,  # a power of two, at least k
):
    row = tl.program_id(0).to(tl.int64) * k
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row + columns, columns < k, other=0).to(tl.float32)
    scale, inverse = int8_scales(tl.max(tl.abs(values), 0))
    tl.store(scales + tl.program_id(0), scale)
    row_sums = sums + tl.program_id(0).to(tl.int64) * tl.cdiv(k, 128)
    store_int8(values, inverse, q + row, row_sums, 0, k, BLOCK)


REDUCED_AT_ONCE = 1024  # features of a program that adds splits


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def _tiles(architecture: int, m: int) -> W8A8Tiles:
    return tiles_of(TILES[architecture], m)


def _splits(tiles: W8A8Tiles, m: int, n: int, k: int) -> int:
    """The number of splits of k: a power of two."""
    return splits_of(m, tiles, n, k // tiles.block_k, even=False)


def variants() -> dict[str, Variant]:
    """A product has one for each architecture, because each has its own tiles."""
    types = {"q_x": "*i8", "scale_x": "*fp32", "q_w": "*i8", "scale_w": "*fp32", "out": "*bf16"}
    types |= dict.fromkeys(("m", "n", "k", "k_split"), "i32")
    made = {}
    shapes = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    products = {80: "IMMA", 90: "IGMMA", 100: "IMMA"}
    sizes = (("qkv", 16), ("gate_up", 16), ("down", 64), ("gate_up", 256), ("gate_up", 8192))
    for architecture, (name, m) in product(TILES, sizes):
        n, k = shapes[name]
        tiles = _tiles(architecture, m)
        constants: dict[str, object] = {"EVEN_K": True} | dict(
            zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tiles[:3], strict=True)
        )
        split = {"parts": "*i32"} if _splits(tiles, m, n, k) > 1 else {}
        absent = {"bias": None} | ({} if split else {"parts": None})
        made[f"{name}-{m}-sm{architecture}"] = Variant(
            _w8a8_kernel,
            types | split,
            constants | absent,
            tiles.num_warps,
            tiles.num_stages,
            ("n", "k", "k_split"),
            {architecture: (products[architecture], "LDGSTS")},
            (architecture,),
        )
    reduced = {"parts": "*i32", "scale_x": "*fp32", "scale_w": "*fp32", "bias": "*bf16", "out": "*bf16"}
    constants = {"SPLITS": 2, "BLOCK_N": REDUCED_AT_ONCE}
    made["reduce"] = Variant(_reduce_kernel, reduced | {"m": "i32", "n": "i32"}, constants, divisible=("n",))
    quantized = {"x": "*bf16", "q": "*i8", "scales": "*fp32", "sums": "*i32", "k": "i32"}
    for k in (4096, 14336):
        block = next_power_of_two(k)
        constants = {"BLOCK": block}
        made[f"quantize-{k}"] = Variant(_quantize_kernel, quantized, constants, _num_warps(block), divisible=("k",))
    return made
